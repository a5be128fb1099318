// A gated DeltaNet mixer in one call: projections, the delta rule, the gated norm, and the projection out.
#pragma once

#include "gated_delta.h"
#include "linear.h"

namespace ttd {

struct DeltaMixer {
  Matrix qkv, z, a, b, projection;
  const void* x;      // [delta.tokens, hidden] in delta.x_type, as what is made on the way
  GatedDelta delta;   // its x, a, b and out are given here
  const float* norm;  // [delta.value_dim]
  float eps;
  void* out;  // [delta.tokens, hidden]
};

void delta_mixer(const DeltaMixer& call);

}  // namespace ttd
