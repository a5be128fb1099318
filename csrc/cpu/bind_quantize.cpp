#include <nanobind/ndarray.h>

#include "bindings.h"
#include "quantize.h"

namespace nb = nanobind;

namespace ttd {
namespace {

using Values = nb::ndarray<nb::ro, nb::numpy, nb::c_contig, nb::device::cpu>;
using Part = nb::ndarray<nb::numpy, nb::c_contig, nb::device::cpu>;

Type number_type(nb::dlpack::dtype type) {
  if (type == nb::dtype<float>()) return Type::f32;
  if (type == nb::dtype<uint16_t>()) return Type::bf16;
  require(type == nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1},
          "Numbers must be float32, float16 or, as uint16, the bits of bfloat16.");
  return Type::f16;
}

template <class Array>
void require_aligned(const Array& array) {
  require(reinterpret_cast<uintptr_t>(array.data()) % (array.dtype().bits / 8u) == 0, "Arrays must be aligned.");
}

void bind_quantize_into(const Values& values, int bits, int group, const Part& codes, const Part& scales, const Part& biases) {
  require(bits == 4 || bits == 8, "Codes have 4 or 8 bits.");
  require(group == 32 || group == 64 || group == 128, "Groups have 32, 64 or 128 numbers.");
  require(values.ndim() > 0 && values.shape(values.ndim() - 1) % static_cast<size_t>(group) == 0, "Rows must divide into groups.");
  const size_t groups = values.size() / static_cast<size_t>(group);
  require(codes.dtype() == nb::dtype<uint32_t>() && codes.size() * 32 == values.size() * static_cast<size_t>(bits),
          "Codes must be uint32 words, as many as hold the values.");
  require(scales.size() == groups && biases.size() == groups && scales.dtype() == biases.dtype(),
          "Scales and biases must be one a group and of one dtype.");
  for (const Part& part : {codes, scales, biases}) require_aligned(part);
  require_aligned(values);
  Quantize call{};
  call.groups = static_cast<int64_t>(groups);
  call.group = group;
  call.bits = bits;
  call.type = number_type(values.dtype());
  call.values = values.data();
  call.codes = static_cast<uint8_t*>(codes.data());
  call.scale_type = number_type(scales.dtype());
  call.scales = scales.data();
  call.biases = biases.data();
  nb::gil_scoped_release release;
  quantize(call);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_into", bind_quantize_into, nb::arg("values"), nb::arg("bits"), nb::arg("group"),
        nb::arg("codes").noconvert(), nb::arg("scales").noconvert(), nb::arg("biases").noconvert(),
        "Pack values [.., n] to codes uint32 with scales and biases, one a group, as mx.quantize does, on this thread alone. "
        "uint16 stands for bfloat16.");
}

}  // namespace ttd
