#include "top.h"

#include "operations.h"

namespace ttd {

void top(const Top& call) { operations().top(call); }

}  // namespace ttd
