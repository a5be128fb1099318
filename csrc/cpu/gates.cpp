#include "gates.h"

#include "operations.h"

namespace ttd {

void swiglu(const SwiGlu& call) { operations().swiglu(call); }
void sigmoid_scaled(const SigmoidScaled& call) { operations().sigmoid_scaled(call); }
void expert_sum(const ExpertSum& call) { operations().expert_sum(call); }

}  // namespace ttd
