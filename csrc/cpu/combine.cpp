#include "combine.h"

#include "pool.h"

namespace ttd {

void combine(const Combine& call) {
  const FloatMode mode(Denormals::kept);
  parallel_for(call.tokens, [&](int64_t t) {
    float* out = call.out + t * call.width;
    for (int64_t j = 0; j < call.choices; ++j) {
      const float* from = call.contributions + (t * call.choices + j) * call.width;
      const float weight = call.weights[t * call.choices + j];
      if (j == 0)
        for (int64_t i = 0; i < call.width; ++i) out[i] = weight * from[i];
      else
        for (int64_t i = 0; i < call.width; ++i) out[i] = out[i] + weight * from[i];
    }
  });
}

}  // namespace ttd
