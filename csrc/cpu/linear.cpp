#include "linear.h"

#include "operations.h"

namespace ttd {

void linear_all(const Linear* calls, int count) { operations().linear_all(calls, count); }

}  // namespace ttd
