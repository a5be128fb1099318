#include "primitive.h"

#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace ttd {
namespace {

// Copies runs of `run` bytes, which lie together, out of the first `axes` axes to where `to` moves on from.
void gather(const char* from, char*& to, const mx::array& a, size_t axis, size_t axes, size_t run) {
  if (axis == axes) {
    std::memcpy(to, from, run);
    to += run;
    return;
  }
  const int64_t stride = a.strides()[axis] * static_cast<int64_t>(a.itemsize());
  for (int i = 0; i < a.shape(static_cast<int>(axis)); ++i) gather(from + i * stride, to, a, axis + 1, axes, run);
}

void copy_rows(const mx::array& from, char* to) {
  size_t axes = from.ndim(), run = from.itemsize();
  const auto together = [&](size_t axis) {
    return from.shape()[axis] == 1 || from.strides()[axis] * static_cast<int64_t>(from.itemsize()) == static_cast<int64_t>(run);
  };
  for (; axes > 0 && together(axes - 1); --axes) run *= static_cast<size_t>(from.shape()[axes - 1]);
  gather(from.data<char>(), to, from, 0, axes, run);
}

mx::array contiguous(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  if (a.flags().row_contiguous || a.size() == 0 || a.ndim() == 0) return a;
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  encoder.add_temporary(copy);
  encoder.dispatch([from = mx::array::unsafe_weak_copy(a), to = mx::array::unsafe_weak_copy(copy)]() mutable {
    copy_rows(from, to.data<char>());
  });
  return copy;
}

class Native : public mx::Primitive {
 public:
  Native(mx::Stream stream, const char* name, std::vector<int> donors, Body body)
      : mx::Primitive(stream), name_(name), donors_(std::move(donors)), body_(std::move(body)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays from, to;
    for (const auto& input : inputs) {
      from.push_back(mx::array::unsafe_weak_copy(contiguous(input, encoder)));
      encoder.set_input_array(from.back());
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int donor = donors_[i];
      if (donor >= 0 && inputs[donor].is_donatable() && inputs[donor].flags().row_contiguous &&
          inputs[donor].data_size() == inputs[donor].size())
        outputs[i].copy_shared_buffer(inputs[donor]);
      else
        outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
      encoder.set_output_array(outputs[i]);
      to.push_back(mx::array::unsafe_weak_copy(outputs[i]));
    }
    encoder.dispatch([body = body_, from = std::move(from), to = std::move(to)]() mutable { body(from, to); });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string("[mlx_ttd] ") + name_ +
                             " is a CPU operation; move its inputs to a CPU stream or use the GPU kernel.");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  std::vector<int> donors_;
  Body body_;
};

}  // namespace

Arrays call(const char* name, Arrays inputs, std::vector<Output> outputs, Body body) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::vector<int> donors;
  for (const auto& output : outputs) {
    shapes.push_back(output.shape);
    dtypes.push_back(output.dtype);
    donors.push_back(output.donor);
  }
  const auto stream = mx::default_stream(mx::Device::cpu);
  return mx::array::make_arrays(std::move(shapes), std::move(dtypes),
                                std::make_shared<Native>(stream, name, std::move(donors), std::move(body)),
                                std::move(inputs));
}

Type type_of(const mx::array& a) {
  if (a.dtype() == mx::float32) return Type::f32;
  if (a.dtype() == mx::bfloat16) return Type::bf16;
  if (a.dtype() == mx::float16) return Type::f16;
  throw std::invalid_argument("Native operations take float32, bfloat16 or float16 arrays; cast the array first.");
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace ttd
