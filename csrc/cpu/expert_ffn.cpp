#include "expert_ffn.h"

#include "operations.h"

namespace ttd {
namespace {

bool fits(const Part& part, int64_t stride) {
  const Matrix& m = part.matrix;
  const int64_t scale_bytes = m.rows * m.groups() * static_cast<int64_t>(size_of(m.type));
  return part.codes >= 0 && part.scales >= 0 && part.biases >= 0 && part.codes + m.rows * m.row_bytes() <= stride &&
         part.scales + scale_bytes <= stride && part.biases + scale_bytes <= stride;
}

}  // namespace

const char* problem(const ExpertFfn& call) {
  const Matrix &up = call.gate_up.matrix, &down = call.down.matrix;
  if (up.cols % up.group != 0 || down.cols % down.group != 0) return "a matrix's columns are not whole groups";
  if (up.rows != 2 * down.cols || up.cols != down.rows) return "gate_up and down do not fit each other";
  if (!fits(call.gate_up, call.stride) || !fits(call.down, call.stride)) return "a record is shorter than its layout";
  for (int64_t e = 0; e < call.experts; ++e)
    if (call.slot_of[e] < -1 || call.slot_of[e] >= call.slots) return "an expert's slot is outside the records";
  for (int64_t i = 0; i < call.tokens * call.choices; ++i)
    if (call.chosen[i] < 0 || call.chosen[i] >= call.experts) return "a chosen expert's id is outside slot_of";
  return nullptr;
}

void expert_ffn(const ExpertFfn& call) { operations().expert_ffn(call); }

}  // namespace ttd
