// The operations, each with its arguments, and the table of them that one instruction set provides.
#pragma once

#include "isa.h"

namespace ttd {

struct ExpertFfn;
struct Linear;

struct Operations {
  void (*expert_ffn)(const ExpertFfn&);
  void (*linear)(const Linear&);
};

}  // namespace ttd
