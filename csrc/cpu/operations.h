// The operations, each with its arguments, and the table of them that one instruction set provides.
#pragma once

#include "isa.h"

namespace ttd {

struct Attention;
struct ExpertFfn;
struct GatedDelta;
struct Linear;
struct NormRope;
struct RmsNorm;
struct Router;

struct Operations {
  void (*attention)(const Attention&);
  void (*expert_ffn)(const ExpertFfn&);
  void (*gated_delta)(const GatedDelta&);
  void (*linear)(const Linear&);
  void (*norm_rope)(const NormRope&);
  void (*rms_norm)(const RmsNorm&);
  void (*router)(const Router&);
};

}  // namespace ttd
