#include "runtime.hpp"
void diagnose_start() {}
void diagnose_threadgroup_end() {}
