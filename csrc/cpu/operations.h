// The operations, each with its arguments, and the table of them that one instruction set provides.
#pragma once

#include "isa.h"

namespace ttd {

struct Attention;
struct ExpertFfn;
struct ExpertSum;
struct GatedDelta;
struct Linear;
struct NormRope;
struct Quantize;
struct RmsNorm;
struct Router;
struct SigmoidScaled;
struct SwiGlu;
struct Top;

struct Operations {
  void (*attention)(const Attention&);
  void (*expert_ffn)(const ExpertFfn&);
  void (*expert_sum)(const ExpertSum&);
  void (*gated_delta)(const GatedDelta&);
  void (*linear_all)(const Linear*, int);
  void (*norm_rope)(const NormRope&);
  void (*quantize)(const Quantize&);
  void (*rms_norm)(const RmsNorm&);
  void (*router)(const Router&);
  void (*sigmoid_scaled)(const SigmoidScaled&);
  void (*swiglu)(const SwiGlu&);
  void (*top)(const Top&);
};

}  // namespace ttd
