// Judges each memory access of a kernel. Clang's thread and undefined-behaviour sanitizers call the functions at the
// end; their own runtimes are not linked.
#include "runtime.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint64_t LINE = 128;
constexpr size_t MAX_REPORTS = 100;
constexpr uint16_t SEVERAL = 0xFFFF;

// Who touched a byte: a lane of a SIMD-group, or SEVERAL lanes of it, after so many barriers. No threadgroup: nobody.
struct Access {
  uint32_t threadgroup;
  uint16_t simdgroup, lane;
  uint32_t epoch, simd_epoch;
};

struct Byte {
  Access write, read, other_read;
};

struct Report {
  const void* site;
  char text[240];
};

// One instruction as one SIMD-group ran it once: an address for each lane so far.
struct Instance {
  uint32_t lanes;
  uint64_t addresses[WIDTH];
};

struct GroupInstances {
  std::deque<Instance> open;
  uint32_t first, next[WIDTH];
};

struct Site {
  const void* site;
  uint32_t buffer, store, bytes, worst;
  uint64_t instructions, asked, used, lines;
  const uint64_t* touched;  // a bit for each byte of the buffer
};

struct SiteState {
  Site totals;
  GroupInstances groups[MAX_THREADS / WIDTH];
  std::vector<uint64_t> touched;
};

std::vector<Report> reports;
std::vector<Site> sites;
std::vector<std::vector<Byte>> shadows;
std::unordered_map<uint64_t, std::unique_ptr<SiteState>> states;

void report(const void* site, const char* format, ...) {
  if (reports.size() >= MAX_REPORTS) return;
  for (const Report& r : reports)
    if (r.site == site && r.text[0] == format[0]) return;
  Report& r = reports.emplace_back();
  r.site = site;
  va_list list;
  va_start(list, format);
  const int written = vsnprintf(r.text, sizeof r.text, format, list);
  va_end(list);
  const Thread& t = run.lane->thread;
  const uint32_t* at = t.threadgroup_position_in_grid.at;
  snprintf(r.text + written, sizeof r.text - written, ", threadgroup (%u,%u,%u) SIMD-group %u lane %u", at[0], at[1],
           at[2], t.simdgroup_index_in_threadgroup, t.thread_index_in_simdgroup);
}

bool inside(const char* p, const void* start, uint64_t bytes) {
  return p >= static_cast<const char*>(start) && p < static_cast<const char*>(start) + bytes;
}

[[noreturn]] void out_of_bounds(const char* p, uint64_t bytes, bool store, const void* site) {
  const Request& r = *run.request;
  const char* word = store ? "store" : "load";
  for (unsigned i = 0; i < r.buffer_count; ++i) {
    const Buffer& b = r.buffers[i];
    const uint64_t guard = b.threadgroup ? THREADGROUP_GUARD : GUARD;
    if (!inside(p, b.data - (b.threadgroup ? 0 : guard), b.bytes + 2 * guard)) continue;
    report(site, "out of bounds: %s of %lu bytes at %s[byte %ld of %lu]", word, bytes, b.name, long(p - b.data), b.bytes);
    abandon(nullptr, nullptr, "");
  }
  report(site, "out of bounds: %s of %lu bytes where no argument is", word, bytes);
  abandon(nullptr, nullptr, "");
}

bool same_group(const Access& a, const Access& b) { return a.threadgroup == b.threadgroup && a.simdgroup == b.simdgroup; }

bool same_time(const Access& a, const Access& b) { return a.epoch == b.epoch && a.simd_epoch == b.simd_epoch; }

// Whether nothing orders `before` and `now`.
bool races(const Access& before, const Access& now, bool threadgroup_memory) {
  if (before.threadgroup == 0) return false;
  if (before.threadgroup != now.threadgroup) return !threadgroup_memory;
  if (before.epoch != now.epoch) return false;
  if (before.simdgroup != now.simdgroup) return true;
  return before.lane != now.lane && before.simd_epoch == now.simd_epoch;
}

void note_read(Byte& byte, const Access& now) {
  Access& slot = byte.read.threadgroup == 0 || same_group(byte.read, now) ? byte.read : byte.other_read;
  const bool joins = same_group(slot, now) && same_time(slot, now) && slot.lane != now.lane;
  slot = now;
  if (joins) slot.lane = SEVERAL;
}

void check_byte(Byte& byte, const Buffer& b, uint64_t at, bool store, const Access& now, const void* site) {
  const bool stale = b.threadgroup && byte.write.threadgroup != now.threadgroup;
  if (b.threadgroup && byte.read.threadgroup != now.threadgroup) byte.read = byte.other_read = {};
  if (!store && !b.initialised && (byte.write.threadgroup == 0 || stale))
    report(site, "uninitialised: load of %s[byte %lu of %lu]", b.name, at, b.bytes);
  if (races(byte.write, now, b.threadgroup))
    report(site, "race: %s of %s[byte %lu of %lu] that another thread stored, with no barrier between",
           store ? "store" : "load", b.name, at, b.bytes);
  if (!store) {
    note_read(byte, now);
    return;
  }
  if (races(byte.read, now, b.threadgroup) || races(byte.other_read, now, b.threadgroup))
    report(site, "race: store of %s[byte %lu of %lu] that another thread loaded, with no barrier between", b.name, at,
           b.bytes);
  byte.write = now;
}

void close(Site& site, Instance& instance) {
  std::sort(instance.addresses, instance.addresses + instance.lanes);
  uint64_t covered = 0, last_line = ~0ul, lines = 0;
  for (uint32_t i = 0; i < instance.lanes; ++i) {
    const uint64_t start = instance.addresses[i], end = start + site.bytes;
    if (end > covered) site.used += end - std::max(start, covered);
    covered = std::max(covered, end);
    for (uint64_t line = start / LINE; line <= (end - 1) / LINE; ++line) {
      lines += last_line == ~0ul || line > last_line;
      last_line = last_line == ~0ul ? line : std::max(last_line, line);
    }
  }
  ++site.instructions;
  site.asked += uint64_t(instance.lanes) * site.bytes;
  site.lines += lines;
  site.worst = std::max<uint32_t>(site.worst, lines);
}

void note_lines(uint64_t address, uint64_t at, uint32_t buffer, uint32_t bytes, bool store, const void* site) {
  const uint64_t key = reinterpret_cast<uint64_t>(site) * 64 + buffer;
  static uint64_t last_key;
  static SiteState* last;
  if (!last || key != last_key || states.empty()) {
    auto& state = states[key];
    if (!state) {
      state = std::make_unique<SiteState>();
      state->touched.resize((run.request->buffers[buffer].bytes + LINE - 1) / LINE * LINE / 64);
      state->totals = {site, buffer, store, bytes, 0, 0, 0, 0, 0, state->touched.data()};
    }
    last = state.get();
    last_key = key;
  }
  const uint64_t ones = bytes == 64 ? ~0ul : (1ul << bytes) - 1;
  last->touched[at / 64] |= ones << at % 64;
  if (at % 64 + bytes > 64) last->touched[at / 64 + 1] |= ones >> (64 - at % 64);
  const Thread& t = run.lane->thread;
  GroupInstances& group = last->groups[t.simdgroup_index_in_threadgroup];
  const uint32_t place = group.next[t.thread_index_in_simdgroup]++ - group.first;
  if (place >= group.open.size()) group.open.emplace_back();
  Instance& instance = group.open[place];
  instance.addresses[instance.lanes++] = address;
  while (!group.open.empty() && group.open.front().lanes == run.lane->group->count) {
    close(last->totals, group.open.front());
    group.open.pop_front();
    ++group.first;
  }
}

void access(const void* address, uint32_t bytes, bool store, bool aligned, const void* site) {
  const char* p = static_cast<const char*>(address);
  if (inside(p, run.lane->stack, STACK) || (!store && inside(p, groups, sizeof groups))) return;
  const Request& r = *run.request;
  uint32_t index = 0;
  while (index < r.buffer_count && !inside(p, r.buffers[index].data, r.buffers[index].bytes)) ++index;
  if (index == r.buffer_count) {
    if (!store && inside(p, r.constants, r.constant_bytes)) return;
    out_of_bounds(p, bytes, store, site);
  }
  const Buffer& b = r.buffers[index];
  const uint64_t at = p - b.data;
  if (at + bytes > b.bytes) out_of_bounds(p, bytes, store, site);
  if (aligned && reinterpret_cast<uint64_t>(p) % bytes)
    report(site, "misaligned: %s of %u bytes at %s[byte %lu of %lu]", store ? "store" : "load", bytes, b.name, at, b.bytes);
  if (store && !b.writable) {
    report(site, "read-only: store of %u bytes to %s[byte %lu of %lu]", bytes, b.name, at, b.bytes);
    abandon(nullptr, nullptr, "");
  }
  if (b.writable) {
    const Lane& lane = *run.lane;
    const uint32_t kind = !b.threadgroup;
    const Access now{run.threadgroup, uint16_t(lane.thread.simdgroup_index_in_threadgroup),
                     uint16_t(lane.thread.thread_index_in_simdgroup), lane.epoch[kind], lane.simd_epoch[kind]};
    for (uint32_t i = 0; i < bytes; ++i) check_byte(shadows[index][at + i], b, at + i, store, now, site);
  }
  if (!b.threadgroup) note_lines(reinterpret_cast<uint64_t>(p), at, index, bytes, store, site);
}

}  // namespace

void diagnose_start() {
  reports.clear();
  sites.clear();
  shadows.clear();
  states.clear();
  for (uint32_t i = 0; i < run.request->buffer_count; ++i) {
    const Buffer& b = run.request->buffers[i];
    shadows.emplace_back(b.writable ? b.bytes : 0);
  }
}

void diagnose_threadgroup_end() {
  for (auto& [key, state] : states) {
    for (auto& group : state->groups) {
      for (Instance& instance : group.open) close(state->totals, instance);
      group = {};
    }
  }
}

void diagnose_end() {
  diagnose_threadgroup_end();
  for (auto& [key, state] : states) sites.push_back(state->totals);
}

#define SITE __builtin_return_address(0)
#define SIZED(n) \
  void __tsan_read##n(void* p) { access(p, n, false, true, SITE); } \
  void __tsan_write##n(void* p) { access(p, n, true, true, SITE); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false, false, SITE); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true, false, SITE); }
#define OVERFLOW(name) \
  void __ubsan_handle_##name(void*, void*, void*) { report(SITE, "undefined: " #name); }

#pragma GCC visibility push(default)
extern "C" {
const Report* msl_reports(uint64_t* count) {
  *count = reports.size();
  return reports.data();
}
const Site* msl_sites(uint64_t* count) {
  *count = sites.size();
  return sites.data();
}

void __tsan_init() {}
SIZED(1)
SIZED(2)
SIZED(4)
SIZED(8)
SIZED(16)
void* __tsan_memcpy(char* to, const char* from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) access(from + i, 1, false, true, SITE);
  for (uint64_t i = 0; i < bytes; ++i) access(to + i, 1, true, true, SITE);
  return std::copy(from, from + bytes, to) - bytes;
}
void* __tsan_memset(char* to, int value, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) access(to + i, 1, true, true, SITE);
  return std::fill_n(to, bytes, char(value)) - bytes;
}
OVERFLOW(add_overflow)
OVERFLOW(sub_overflow)
OVERFLOW(mul_overflow)
OVERFLOW(divrem_overflow)
OVERFLOW(negate_overflow)
OVERFLOW(shift_out_of_bounds)
OVERFLOW(float_cast_overflow)
OVERFLOW(out_of_bounds)
}
#pragma GCC visibility pop
