#include <stdexcept>

#include "bindings.h"
#include "combine.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

Type scale_type(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "bfloat16") return Type::bf16;
  if (name == "float16") return Type::f16;
  throw std::invalid_argument("Native experts have scales of float32, bfloat16 or float16, not " + name + ".");
}

Part part(int64_t rows, int64_t cols, int bits, int group, const std::string& scales_as, int64_t codes, int64_t scales, int64_t biases) {
  require(bits == 4 || bits == 8, "Native experts have codes of 4 or 8 bits.");
  require(group == 32 || group == 64 || group == 128, "Native experts have groups of 32, 64 or 128.");
  Matrix m;
  m.format = bits == 4 ? Format::int4 : Format::int8;
  m.type = scale_type(scales_as);
  m.group = group;
  m.rows = rows;
  m.cols = cols;
  return {m, codes, scales, biases};
}

mx::array bind(const mx::array& x, const mx::array& records, const mx::array& slot_of, const mx::array& chosen,
               const std::optional<mx::array>& weights, const Layout& layout, const std::optional<mx::array>& sums) {
  ExpertFfn call = expert_call(x, records, slot_of, chosen, layout);
  require(!weights || (weights->shape() == chosen.shape() && weights->dtype() == mx::float32),
          "weights must be float32 with the shape of rows.");
  require(!sums || (weights && sums->dtype() == mx::float32 && sums->shape() == x.shape()),
          "acc must be float32 [tokens, hidden], and comes with weights.");
  // Only a prefill adds to sums.
  call.accumulate = sums.has_value();
  call.gate_up.matrix = multiplied(call.gate_up.matrix, call.accumulate);
  call.down.matrix = multiplied(call.down.matrix, call.accumulate);
  Arrays inputs{x, records, slot_of, chosen};
  if (weights) inputs.push_back(*weights);
  if (sums) inputs.push_back(*sums);
  mx::Shape shape = weights ? x.shape() : mx::Shape{chosen.shape(0), chosen.shape(1), x.shape(1)};
  return ttd::call("expert_ffn", std::move(inputs), {{std::move(shape), mx::float32, sums ? 5 : -1}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     call.records = in[1].data<uint8_t>();
                     call.slot_of = in[2].data<int32_t>();
                     call.chosen = in[3].data<int32_t>();
                     call.weights = in.size() > 4 ? in[4].data<float>() : nullptr;
                     call.out = out[0].data<float>();
                     check(call);
                     if (call.accumulate && out[0].data<void>() != in[5].data<void>())
                       std::copy_n(in[5].data<float>(), in[5].size(), call.out);
                     expert_ffn(call);
                   })[0];
}

mx::array bind_combine(const mx::array& contributions, const mx::array& weights) {
  require(contributions.ndim() == 3 && contributions.dtype() == mx::float32 && contributions.shape(1) > 0,
          "contributions must be float32 [tokens, choices, hidden].");
  require(weights.dtype() == mx::float32 && weights.shape() == mx::Shape{contributions.shape(0), contributions.shape(1)},
          "weights must be float32 [tokens, choices].");
  Combine call{contributions.shape(0), contributions.shape(1), contributions.shape(2), nullptr, nullptr, nullptr};
  return ttd::call("combine", {contributions, weights}, {{{contributions.shape(0), contributions.shape(2)}, mx::float32}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.contributions = in[0].data<float>();
                     call.weights = in[1].data<float>();
                     call.out = out[0].data<float>();
                     combine(call);
                   })[0];
}

}  // namespace

void check(const ExpertFfn& call) {
  if (const char* what = problem(call))
    throw std::invalid_argument(std::string("Expert records cannot be multiplied: ") + what + ".");
}

ExpertFfn expert_call(const mx::array& x, const mx::array& records, const mx::array& slot_of, const mx::array& chosen,
                      const Layout& layout) {
  const int hidden = static_cast<int>(layout.down.matrix.rows);
  require(x.ndim() == 2 && x.shape(1) == hidden, "x must be [tokens, " + std::to_string(hidden) + "].");
  require(records.ndim() == 2 && records.dtype() == mx::uint8, "records must be uint8 [slots, stride].");
  require(slot_of.ndim() == 1 && slot_of.dtype() == mx::int32, "slot_of must be int32 [experts].");
  require(chosen.ndim() == 2 && chosen.dtype() == mx::int32 && chosen.shape(0) == x.shape(0),
          "rows must be int32 [tokens, choices].");
  ExpertFfn call{};
  call.gate_up = layout.gate_up;
  call.down = layout.down;
  call.slots = records.shape(0);
  call.stride = records.shape(1);
  call.experts = slot_of.shape(0);
  call.tokens = chosen.shape(0);
  call.choices = chosen.shape(1);
  call.x_type = type_of(x);
  const bool known = slot_of.is_available() && chosen.is_available() && slot_of.flags().row_contiguous && chosen.flags().row_contiguous;
  ExpertFfn first = call;
  if (known) {
    first.slot_of = slot_of.data<int32_t>();
    first.chosen = chosen.data<int32_t>();
  } else {
    first.experts = first.tokens = 0;
  }
  check(first);
  return call;
}

void bind_expert_ffn(nb::module_& m) {
  nb::class_<Part>(m, "Part", "A packed matrix within a record.")
      .def("__init__", [](Part* self, int64_t rows, int64_t cols, int bits, int group, const std::string& scale_dtype, int64_t codes,
                          int64_t scales, int64_t biases) {
        new (self) Part(part(rows, cols, bits, group, scale_dtype, codes, scales, biases));
      }, nb::arg("rows"), nb::arg("cols"), nb::arg("bits"), nb::arg("group"), nb::arg("scale_dtype"), nb::arg("codes"),
         nb::arg("scales"), nb::arg("biases"));
  nb::class_<Layout>(m, "Layout", "Where the parts of a record lie.")
      .def(nb::init<Part, Part>(), nb::arg("gate_up"), nb::arg("down"));
  m.def("combine", bind_combine, nb::arg("contributions"), nb::arg("weights"),
        "Sums of weights [T, k] times contributions f32 [T, k, H] in order of k: f32 [T, H].");
  m.def("expert_ffn", bind, nb::arg("x"), nb::arg("records"), nb::arg("slot_of"), nb::arg("rows"),
        nb::arg("weights").none(), nb::arg("layout"), nb::arg("acc").none() = nb::none(),
        "Weighted sums of experts f32 [T, H], added to acc if given; without weights each output f32 [T, k, H].");
}

}  // namespace ttd
