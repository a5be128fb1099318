#include "attention.h"

#include "operations.h"

namespace ttd {

void attention(const Attention& call) { operations().attention(call); }

}  // namespace ttd
