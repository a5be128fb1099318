#include "linear.h"

#include "operations.h"

namespace ttd {

void linear(const Linear& call) { operations().linear(call); }

}  // namespace ttd
