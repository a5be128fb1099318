#include "bindings.h"
#include "gated_delta.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

void require_f32(const mx::array& a, const mx::Shape& shape, const std::string& name) {
  require(a.dtype() == mx::float32 && a.shape() == shape, name + " must be float32 and fit the state's heads.");
}

std::tuple<mx::array, mx::array, mx::array> bind(const mx::array& qkv, const mx::array& a, const mx::array& b,
                                                 const mx::array& conv_state, const mx::array& conv_weight,
                                                 const mx::array& a_log, const mx::array& dt_bias, const mx::array& state,
                                                 int key_heads) {
  GatedDelta call = delta_call(conv_state, conv_weight, a_log, dt_bias, state, key_heads);
  const int channels = static_cast<int>(call.channels()), heads = state.shape(0);
  require(qkv.ndim() == 2 && qkv.shape(0) > 0 && qkv.shape(1) == channels, "qkv must be [tokens, " + std::to_string(channels) + "].");
  require(a.shape() == mx::Shape{qkv.shape(0), heads} && b.shape() == a.shape(), "a and b must be [tokens, value heads].");
  call.tokens = qkv.shape(0);
  call.x_type = type_of(qkv);
  call.a_type = type_of(a);
  call.b_type = type_of(b);
  auto out = ttd::call("gated_delta", {qkv, a, b, conv_state, conv_weight, a_log, dt_bias, state},
                       {{state.shape(), mx::float32, 7},
                        {{qkv.shape(0), heads, state.shape(1)}, mx::float32},
                        {conv_state.shape(), conv_state.dtype()}},
                       [call](const Arrays& in, Arrays& out) mutable {
                         call.x = in[0].data<void>();
                         call.a = in[1].data<void>();
                         call.b = in[2].data<void>();
                         call.conv_state = in[3].data<void>();
                         call.conv_weight = in[4].data<float>();
                         call.a_log = in[5].data<float>();
                         call.dt_bias = in[6].data<float>();
                         call.state = in[7].data<float>();
                         call.new_state = out[0].data<float>();
                         call.out = out[1].data<float>();
                         call.new_conv_state = out[2].data<void>();
                         gated_delta(call);
                       });
  return {out[1], out[2], out[0]};
}

}  // namespace

GatedDelta delta_call(const mx::array& conv_state, const mx::array& conv_weight, const mx::array& a_log, const mx::array& dt_bias,
                      const mx::array& state, int key_heads) {
  require(state.ndim() == 3 && state.dtype() == mx::float32 && state.size() > 0, "state must be float32 [value heads, dv, dk].");
  const int heads = state.shape(0);
  require(key_heads > 0 && heads % key_heads == 0, "The value heads must be a multiple of the key heads.");
  require(conv_weight.ndim() == 2 && conv_weight.shape(1) >= 1 && conv_weight.shape(1) <= GatedDelta::most_taps,
          "conv_weight must be [channels, taps] with 1 to 8 taps.");
  GatedDelta call{};
  call.key_heads = key_heads;
  call.value_heads = heads;
  call.value_dim = state.shape(1);
  call.key_dim = state.shape(2);
  call.taps = conv_weight.shape(1);
  const int channels = static_cast<int>(call.channels());
  require(conv_state.shape() == mx::Shape{conv_weight.shape(1) - 1, channels}, "conv_state must be [taps - 1, channels].");
  require_f32(conv_weight, {channels, conv_weight.shape(1)}, "conv_weight");
  require_f32(a_log, {heads}, "a_log");
  require_f32(dt_bias, {heads}, "dt_bias");
  call.conv_type = type_of(conv_state);
  return call;
}

void bind_gated_delta(nb::module_& m) {
  m.def("gated_delta", bind, nb::arg("qkv"), nb::arg("a"), nb::arg("b"), nb::arg("conv_state"), nb::arg("conv_weight"),
        nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("state"), nb::arg("key_heads"),
        "Out f32 [T, value heads, dv], and conv_state and state after T tokens.");
}

}  // namespace ttd
