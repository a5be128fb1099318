#include "bindings.h"
#include "delta_mixer.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

std::tuple<mx::array, mx::array, mx::array> bind(const mx::array& x, const Stored& qkv, const Stored& z, const Stored& a,
                                                 const Stored& b, const Stored& out, const mx::array& conv_state,
                                                 const mx::array& conv_weight, const mx::array& a_log, const mx::array& dt_bias,
                                                 const mx::array& state, const mx::array& norm, int key_heads, float eps) {
  DeltaMixer made{};
  GatedDelta& delta = made.delta = delta_call(conv_state, conv_weight, a_log, dt_bias, state, key_heads);
  const int64_t heads = delta.value_heads, values = heads * delta.value_dim;
  for (const Stored* w : {&qkv, &z, &a, &b}) require_rows(x, *w);
  require(x.shape(0) > 0 && qkv.matrix.rows == delta.channels() && z.matrix.rows == values && a.matrix.rows == heads &&
              b.matrix.rows == heads && out.matrix.rows == x.shape(1) && out.matrix.cols == values,
          "The projections must fit x and the state's heads.");
  require(norm.dtype() == mx::float32 && norm.shape() == mx::Shape{static_cast<int>(delta.value_dim)}, "norm must be float32 [dv].");
  delta.tokens = x.shape(0);
  delta.x_type = delta.a_type = delta.b_type = type_of(x);
  made.qkv = qkv.matrix;
  made.z = z.matrix;
  made.a = a.matrix;
  made.b = b.matrix;
  made.projection = out.matrix;
  made.eps = eps;
  Arrays inputs{x, conv_state, conv_weight, a_log, dt_bias, norm, state};
  for (const Stored* w : {&qkv, &z, &a, &b, &out}) add_weight(inputs, *w);
  auto arrays = ttd::call("delta_mixer", std::move(inputs),
                          {{state.shape(), mx::float32, 6}, {x.shape(), x.dtype()}, {conv_state.shape(), conv_state.dtype()}},
                          [call = made](const Arrays& in, Arrays& out) mutable {
                            call.x = in[0].data<void>();
                            call.delta.conv_state = in[1].data<void>();
                            call.delta.conv_weight = in[2].data<float>();
                            call.delta.a_log = in[3].data<float>();
                            call.delta.dt_bias = in[4].data<float>();
                            call.norm = in[5].data<float>();
                            call.delta.state = in[6].data<float>();
                            size_t next = 7;
                            for (Matrix* m : {&call.qkv, &call.z, &call.a, &call.b, &call.projection}) next = point_at(*m, in, next);
                            call.delta.new_state = out[0].data<float>();
                            call.out = out[1].data<void>();
                            call.delta.new_conv_state = out[2].data<void>();
                            delta_mixer(call);
                          });
  return {arrays[1], arrays[2], arrays[0]};
}

}  // namespace

void bind_delta_mixer(nb::module_& m) {
  m.def("delta_mixer", bind, nb::arg("x"), nb::arg("qkv"), nb::arg("z"), nb::arg("a"), nb::arg("b"), nb::arg("out"),
        nb::arg("conv_state"), nb::arg("conv_weight"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("state"), nb::arg("norm"),
        nb::arg("key_heads"), nb::arg("eps"), "A gated DeltaNet mixer: [T, H] in x's dtype, and conv_state and state after T tokens.");
}

}  // namespace ttd
