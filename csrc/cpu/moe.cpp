#include "moe.h"

#include "gates.h"
#include "linear.h"
#include "pool.h"

namespace ttd {

void shared_expert(const SharedExpert& call) {
  const int64_t inner = call.tokens * call.gate.rows;
  float* gate = scratch<float>(Scratch::shared, 2 * inner + call.tokens);
  float *up = gate + inner, *scale = up + inner;
  const auto from_x = [&](const Matrix& m, float* out) {
    return Linear{m, 0, m.rows, call.tokens, call.x_type, call.x, Type::f32, out, call.prefill};
  };
  const Linear inputs[]{from_x(call.gate, gate), from_x(call.up, up), from_x(call.scale, scale)};
  linear_all(inputs, 3);
  swiglu({inner, gate, up, gate});
  const Linear down{call.down, 0, call.down.rows, call.tokens, Type::f32, gate, Type::f32, call.out, call.prefill};
  linear_all(&down, 1);
  sigmoid_scaled({call.tokens, call.down.rows, scale, call.out, call.out});
}

void moe(const Moe& call) {
  Moe c = call;
  const int64_t count = c.shared.tokens * c.shared.down.rows;
  c.routed.out = scratch<float>(Scratch::routed, 2 * count);
  c.shared.out = c.routed.out + count;
  expert_ffn(c.routed);
  shared_expert(c.shared);
  expert_sum({count, c.shared.x_type, c.residual, c.routed.out, c.shared.out, c.out});
}

}  // namespace ttd
