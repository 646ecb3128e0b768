// Cuts for a product whose operands lie on one device: the other devices must fetch what they
// multiply, so they get fewer rows. Plain numbers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spamm::shards {

// What a group of rows of A costs, in one unit of time.
struct GroupCost {
  int64_t multiply;
  int64_t fetch_a;
  int64_t fetch_b;       // all that the group needs of B
  int64_t fetch_more_b;  // what it needs of B that the group before it does not
};

// parts + 1 numbers of groups. Part `home` has the operands; none has if there is no part of this
// number. Another part starts `delay` later, fetches from B first, and then from A while it
// multiplies; one that would not save time gets no group. Among contiguous cuts, these make the
// slowest part as fast as possible, to a thousandth. (A part is taken to need of B what its first
// group needs and what each other group needs more than the one before; for decay this is exact.)
std::vector<int64_t> cut_for_home(std::span<const GroupCost> groups, int64_t parts, int64_t home,
                                  int64_t delay);

}  // namespace spamm::shards
