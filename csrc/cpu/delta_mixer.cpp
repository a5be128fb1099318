#include "delta_mixer.h"

#include "norms.h"
#include "pool.h"

namespace ttd {

void delta_mixer(const DeltaMixer& call) {
  GatedDelta delta = call.delta;
  const Type type = delta.x_type;
  const int64_t tokens = delta.tokens, heads = delta.value_heads, values = heads * delta.value_dim;
  const int64_t sizes[]{delta.channels(), values, heads, heads, values};
  int64_t numbers = values;
  for (const int64_t size : sizes) numbers += size;
  float* const start = scratch<float>(Scratch::mixer, tokens * numbers);
  float* next = start;
  const auto take = [&](int64_t size) {
    float* taken = next;
    next += tokens * size;
    return taken;
  };
  float *qkv = take(sizes[0]), *z = take(values), *a = take(heads), *b = take(heads), *mixed = take(values), *gated = take(values);
  const auto from_x = [&](const Matrix& m, void* out) { return Linear{m, 0, m.rows, tokens, type, call.x, type, out}; };
  const Linear inputs[]{from_x(call.qkv, qkv), from_x(call.z, z), from_x(call.a, a), from_x(call.b, b)};
  linear_all(inputs, 4);
  delta.x = qkv;
  delta.a = a;
  delta.b = b;
  delta.out = mixed;
  gated_delta(delta);
  rms_norm({tokens * heads, delta.value_dim, call.eps, Type::f32, mixed, call.norm, type, z, gated});
  const Linear out{call.projection, 0, call.projection.rows, tokens, type, gated, type, call.out};
  linear_all(&out, 1);
}

}  // namespace ttd
