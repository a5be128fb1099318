#include "attention.h"
#include "bindings.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

// Rows that `arrays` hold, without pointers: plain numbers, or codes, scales and biases.
KeptRows rows_of(const Arrays& arrays, int head_dim) {
  const std::string what = "keys and values must each be numbers [key heads, positions, head_dim], or 8-bit codes with scales and biases.";
  require((arrays.size() == 1 || arrays.size() == 3) && arrays[0].ndim() == 3, what);
  KeptRows rows{};
  if (arrays.size() == 1) {
    rows.type = type_of(arrays[0]);
    require(arrays[0].shape(2) == head_dim, "Keys and queries must have the same head_dim.");
    return rows;
  }
  const mx::array &codes = arrays[0], &scales = arrays[1], &biases = arrays[2];
  require(codes.dtype() == mx::uint32 && codes.shape(2) * 4 == head_dim, "Codes must be uint32 and four to a word along head_dim.");
  require(scales.dtype() == mx::bfloat16 && biases.dtype() == mx::bfloat16 && scales.shape() == biases.shape() && scales.ndim() == 3,
          "Scales and biases of codes must be bfloat16 and alike.");
  require(scales.shape(0) == codes.shape(0) && scales.shape(1) == codes.shape(1) && scales.shape(2) > 0 &&
              head_dim % scales.shape(2) == 0,
          "Codes must have a scale for each group along head_dim.");
  rows.group = head_dim / scales.shape(2);
  require(rows.group == 32 || rows.group == 64 || rows.group == 128, "Groups of codes must be of 32, 64 or 128.");
  return rows;
}

// Points rows at their arrays among `inputs`, which begin at index `first`.
void point_at(KeptRows& rows, const Arrays& inputs, size_t first) {
  rows.numbers = inputs[first].data<void>();
  if (rows.group == 0) return;
  rows.scales = static_cast<const bf16*>(inputs[first + 1].data<void>());
  rows.biases = static_cast<const bf16*>(inputs[first + 2].data<void>());
}

mx::array bind(const mx::array& q, const Arrays& keys, const Arrays& values, int64_t offset, const std::optional<mx::array>& gate,
               float scale) {
  require(q.ndim() == 3 && q.size() > 0, "q must be [tokens, heads, head_dim], none of them 0.");
  Attention call{};
  call.keys = rows_of(keys, q.shape(2));
  call.values = rows_of(values, q.shape(2));
  const mx::array& key = keys[0];
  require(values[0].shape() == key.shape() && values[0].dtype() == key.dtype() && call.values.group == call.keys.group,
          "keys and values must be of one shape, dtype and group.");
  require(key.shape(0) > 0 && q.shape(1) % key.shape(0) == 0, "The query heads must be a multiple of the key heads.");
  require(offset >= 0 && offset + q.shape(0) <= key.shape(1), "There must be a key for the position of every query.");
  require(!gate || gate->shape() == q.shape(), "gate must have the shape of q.");
  call.tokens = q.shape(0);
  call.heads = q.shape(1);
  call.key_heads = key.shape(0);
  call.head_dim = q.shape(2);
  call.offset = offset;
  call.capacity = key.shape(1);
  call.scale = scale;
  call.type = type_of(q);
  call.gate_type = gate ? type_of(*gate) : Type::f32;
  Arrays inputs{q};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  const size_t first_value = 1 + keys.size(), gate_at = first_value + values.size();
  if (gate) inputs.push_back(*gate);
  return ttd::call("attention", std::move(inputs), {{{q.shape(0), q.shape(1) * q.shape(2)}, q.dtype()}},
                   [call, first_value, gate_at](const Arrays& in, Arrays& out) mutable {
                     call.q = in[0].data<void>();
                     point_at(call.keys, in, 1);
                     point_at(call.values, in, first_value);
                     call.gate = in.size() > gate_at ? in[gate_at].data<void>() : nullptr;
                     call.out = out[0].data<void>();
                     attention(call);
                   })[0];
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention", bind, nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("offset"), nb::arg("gate").none(),
        nb::arg("scale"),
        "softmax(scale q k^T) v, query row i at position offset + i, times sigmoid(gate): [T, heads * head_dim] in q's dtype. "
        "keys and values: [numbers], or [codes, scales, biases] of 8 bits.");
}

}  // namespace ttd
