#include "rows.h"

#include <algorithm>
#include <string>

namespace headrace {

namespace {
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("rows: " + what); }
}  // namespace

void RowsView::check() {
  int32_t last_slot = -1, first_slot = 0;
  for (int64_t i = 0; i < list_size; i++) {
    first_slot = std::min(first_slot, lists[i]);
    last_slot = std::max(last_slot, lists[i]);
  }
  if (first_slot < 0) refuse("negative slot in lists");
  for (int64_t r = 0; r < count; r++) {
    if (base[r] < 0 || base_len[r] < 0 || int64_t{base[r]} + base_len[r] > list_size || extra[r] < 0 ||
        extra_len[r] < 0 || int64_t{extra[r]} + extra_len[r] > list_size)
      refuse("row " + std::to_string(r) + " reaches outside lists");
    if (position[r] != int64_t{base_len[r]} + extra_len[r] - 1)
      refuse("row " + std::to_string(r) + ": position isn't the length of its lists less one");
    if (position[r] < 0 || slot_at(r, position[r]) != slot[r])
      refuse("row " + std::to_string(r) + ": its own slot isn't the last of its lists");
    if (token[r] < 0) refuse("row " + std::to_string(r) + ": negative token");
    last_position = std::max(last_position, position[r]);
  }
  for (int64_t i = 0; i < wanted_count; i++)
    if (wanted[i] < 0 || wanted[i] >= count || (i > 0 && wanted[i] <= wanted[i - 1]))
      refuse("wanted isn't an ascending list of rows");
  std::vector<bool> used(static_cast<size_t>(last_slot / kPage + 1));
  int32_t previous = -1;
  for (int64_t i = 0; i < list_size; i++) {
    const int32_t page = lists[i] / kPage;
    if (page == previous) continue;
    previous = page;
    if (!used[static_cast<size_t>(page)]) pages.push_back(page);
    used[static_cast<size_t>(page)] = true;
  }
}

void KVView::check(const RowsView& rows) const {
  for (const int32_t page : rows.pages) {
    if (page >= page_count) throw std::invalid_argument("kv: slot beyond the page table");
    if (pages[page] == 0) throw std::invalid_argument("kv: page " + std::to_string(page) + " isn't in memory");
  }
}

}  // namespace headrace
