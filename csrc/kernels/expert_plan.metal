// Groups the choices rows [T, CHOICES] by leased expert, in ascending expert and choice, and cuts each group into tiles
// of at most TILE. One threadgroup; a thread an expert; x is there for its number of rows. order: choices grouped; tiles: expert, first, end in `order`,
// all 0 past the last tile. Choices of experts that are not leased are in no tile.
TGMEM int counts[EXPERTS], tile_counts[EXPERTS];
const int expert = thread_position_in_threadgroup.x;
const int choices = x_shape[0] * CHOICES;
const int tile_limit = choices / TILE + (choices < EXPERTS ? choices : EXPERTS);
const bool leased = expert < EXPERTS && slot_of[expert < EXPERTS ? expert : 0] >= 0;
int count = 0;
if (leased) {
  for (int i = 0; i < choices; ++i) count += rows[i] == expert ? 1 : 0;
}
if (expert < EXPERTS) {
  counts[expert] = count;
  tile_counts[expert] = (count + TILE - 1) / TILE;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
int first = 0, tile = 0, all_tiles = 0;
for (int other = 0; other < EXPERTS; ++other) {
  first += other < expert ? counts[other] : 0;
  tile += other < expert ? tile_counts[other] : 0;
  all_tiles += tile_counts[other];
}
if (count > 0) {
  int at = first;
  for (int i = 0; i < choices; ++i) {
    if (rows[i] == expert) order[at++] = i;
  }
  for (int from = first; from < first + count; from += TILE, ++tile) {
    tiles[tile * 3] = expert;
    tiles[tile * 3 + 1] = from;
    tiles[tile * 3 + 2] = from + TILE < first + count ? from + TILE : first + count;
  }
}
for (int i = all_tiles + expert; i < tile_limit; i += THREADS) {
  for (int j = 0; j < 3; ++j) tiles[i * 3 + j] = 0;
}
