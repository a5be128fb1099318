#include "attention.h"
#include "bindings.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

mx::array bind(const mx::array& q, const mx::array& keys, const mx::array& values, int64_t offset,
               const std::optional<mx::array>& gate, float scale) {
  require(q.ndim() == 3 && q.size() > 0, "q must be [tokens, heads, head_dim], none of them 0.");
  require(keys.ndim() == 3 && keys.shape() == values.shape() && keys.dtype() == values.dtype(),
          "keys and values must be [key heads, positions, head_dim] of one dtype.");
  require(keys.shape(2) == q.shape(2), "Keys and queries must have the same head_dim.");
  require(keys.shape(0) > 0 && q.shape(1) % keys.shape(0) == 0, "The query heads must be a multiple of the key heads.");
  require(offset >= 0 && offset + q.shape(0) <= keys.shape(1), "There must be a key for the position of every query.");
  require(!gate || gate->shape() == q.shape(), "gate must have the shape of q.");
  Attention call{};
  call.tokens = q.shape(0);
  call.heads = q.shape(1);
  call.key_heads = keys.shape(0);
  call.head_dim = q.shape(2);
  call.offset = offset;
  call.capacity = keys.shape(1);
  call.scale = scale;
  call.type = type_of(q);
  call.gate_type = gate ? type_of(*gate) : Type::f32;
  call.key_type = type_of(keys);
  Arrays inputs{q, keys, values};
  if (gate) inputs.push_back(*gate);
  return ttd::call("attention", std::move(inputs), {{{q.shape(0), q.shape(1) * q.shape(2)}, q.dtype()}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.q = in[0].data<void>();
                     call.keys = in[1].data<void>();
                     call.values = in[2].data<void>();
                     call.gate = in.size() > 3 ? in[3].data<void>() : nullptr;
                     call.out = out[0].data<void>();
                     attention(call);
                   })[0];
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention", bind, nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("offset"), nb::arg("gate").none(),
        nb::arg("scale"),
        "softmax(scale q k^T) v, query row i at position offset + i, times sigmoid(gate): [T, heads * head_dim] in q's dtype.");
}

}  // namespace ttd
