#include "bindings.h"
#include "norms.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

void require_weight(const mx::array& x, const mx::array& weight) {
  require(x.ndim() >= 1 && x.shape(-1) > 0, "x must have a last axis to norm.");
  require(weight.dtype() == mx::float32 && weight.shape() == mx::Shape{x.shape(-1)}, "The weight must be float32 [n].");
}

mx::array bind_rms_norm(const mx::array& x, const mx::array& weight, float eps, const std::optional<mx::array>& gate) {
  require_weight(x, weight);
  require(!gate || gate->shape() == x.shape(), "gate must have the shape of x.");
  RmsNorm call{};
  call.width = x.shape(-1);
  call.rows = static_cast<int64_t>(x.size()) / call.width;
  call.eps = eps;
  call.x_type = type_of(x);
  call.out_type = gate ? type_of(*gate) : call.x_type;
  Arrays inputs{x, weight};
  if (gate) inputs.push_back(*gate);
  return ttd::call("rms_norm", std::move(inputs), {{x.shape(), gate ? gate->dtype() : x.dtype()}},
                   [call](const Arrays& in, Arrays& out) mutable {
                     call.x = in[0].data<void>();
                     call.weight = in[1].data<float>();
                     call.gate = in.size() > 2 ? in[2].data<void>() : nullptr;
                     call.out = out[0].data<void>();
                     rms_norm(call);
                   })[0];
}

mx::array bind_norm_rope(const mx::array& x, const mx::array& weight, float eps, int dims, double theta, int64_t offset) {
  require_weight(x, weight);
  require(x.ndim() == 3, "x must be [tokens, heads, head_dim].");
  require(dims >= 0 && dims % 2 == 0 && dims <= x.shape(2), "The rotated channels must be an even number within head_dim.");
  NormRope call{};
  call.tokens = x.shape(0);
  call.heads = x.shape(1);
  call.head_dim = x.shape(2);
  call.rotated = dims;
  call.offset = offset;
  call.eps = eps;
  call.theta = theta;
  call.type = type_of(x);
  return ttd::call("norm_rope", {x, weight}, {{x.shape(), x.dtype()}}, [call](const Arrays& in, Arrays& out) mutable {
    call.x = in[0].data<void>();
    call.weight = in[1].data<float>();
    call.out = out[0].data<void>();
    norm_rope(call);
  })[0];
}

}  // namespace

void bind_norms(nb::module_& m) {
  m.def("rms_norm", bind_rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("gate").none() = nb::none(),
        "x [..., n] by its root mean square and weight f32 [n], in x's dtype; with a gate times silu(gate), in the gate's.");
  m.def("norm_rope", bind_norm_rope, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("dims"), nb::arg("theta"),
        nb::arg("offset"), "The norm of each head of x [T, heads, n], then rotary embedding of its first dims channels.");
}

}  // namespace ttd
