#include "bindings.h"
#include "moe.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

// A call without pointers, and its weights' arrays appended to `inputs`.
SharedExpert shared_call(const mx::array& x, const Stored& gate, const Stored& up, const Stored& down, const Stored& scale,
                         bool prefill, Arrays& inputs) {
  require_rows(x, gate);
  require_rows(x, up);
  require_rows(x, scale);
  const Matrix& d = down.matrix;
  require(up.matrix.rows == gate.matrix.rows && d.cols == gate.matrix.rows && d.rows == x.shape(1) && scale.matrix.rows == 1,
          "gate and up must be [inner, hidden], down [hidden, inner] and scale [1, hidden].");
  for (const Stored* w : {&gate, &up, &down, &scale}) add_weight(inputs, *w);
  const auto by = [&](const Matrix& m) { return multiplied(m, prefill); };
  return {by(gate.matrix), by(up.matrix), by(d), by(scale.matrix), x.shape(0), type_of(x), nullptr, nullptr, prefill};
}

void point_at(SharedExpert& call, const Arrays& in, size_t first) {
  for (Matrix* m : {&call.gate, &call.up, &call.down, &call.scale}) first = ttd::point_at(*m, in, first);
}

mx::array bind_shared_expert(const mx::array& x, const Stored& gate, const Stored& up, const Stored& down, const Stored& scale,
                             bool prefill) {
  Arrays inputs{x};
  const SharedExpert shared = shared_call(x, gate, up, down, scale, prefill, inputs);
  return ttd::call("shared_expert", std::move(inputs), {{x.shape(), mx::float32}},
                   [call = shared](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     point_at(call, in, 1);
                     call.out = out[0].data<float>();
                     shared_expert(call);
                   })[0];
}

mx::array bind_moe_layer(const mx::array& residual, const mx::array& x, const mx::array& records, const mx::array& slot_of,
                         const mx::array& chosen, const mx::array& weights, const Layout& layout, const Stored& gate,
                         const Stored& up, const Stored& down, const Stored& scale) {
  require(residual.shape() == x.shape() && residual.dtype() == x.dtype(), "residual must have the shape and dtype of x.");
  require(weights.shape() == chosen.shape() && weights.dtype() == mx::float32, "weights must be float32 with the shape of rows.");
  Moe made{};
  made.routed = expert_call(x, records, slot_of, chosen, layout);
  Arrays inputs{x, records, slot_of, chosen, weights, residual};
  made.shared = shared_call(x, gate, up, down, scale, false, inputs);
  return ttd::call("moe", std::move(inputs), {{x.shape(), x.dtype()}}, [call = made](const Arrays& in, Arrays& out) mutable {
    call.routed.x = call.shared.x = in[0].data<void>();
    call.routed.records = in[1].data<uint8_t>();
    call.routed.slot_of = in[2].data<int32_t>();
    call.routed.chosen = in[3].data<int32_t>();
    call.routed.weights = in[4].data<float>();
    check(call.routed);
    call.residual = in[5].data<void>();
    point_at(call.shared, in, 6);
    call.out = out[0].data<void>();
    moe(call);
  })[0];
}

}  // namespace

void bind_moe(nb::module_& m) {
  m.def("shared_expert", bind_shared_expert, nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("scale"),
        nb::arg("prefill") = false, "sigmoid(scale x) * down(silu(gate x) * up x), f32 [T, H].");
  m.def("moe", bind_moe_layer, nb::arg("residual"), nb::arg("x"), nb::arg("records"), nb::arg("slot_of"), nb::arg("rows"),
        nb::arg("weights"), nb::arg("layout"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("scale"),
        "residual [T, H] plus the chosen experts of x [T, H] and the shared one, in x's dtype.");
}

}  // namespace ttd
