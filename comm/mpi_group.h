// The ranks of an MPI job, on one machine or on many. What is added arrives from each rank and is added in
// the order of ranks, as in SharedGroup: the same bits.
#pragma once

#include <memory>

#include "comm/group.h"
#include "comm/mpi_link.h"

namespace lm {

class MpiGroup final : public Group {
 public:
  // `staging`: bytes for what arrives to be added. `on_enter` is told each collective that the rank enters.
  explicit MpiGroup(MpiLink& link, int64_t staging = kStaging,
                    std::function<void(const char* what)> on_enter = {});

  static constexpr int64_t kStaging = int64_t{8} << 20;

  int rank() const override { return link_.rank(); }
  int ranks() const override { return link_.ranks(); }
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override;
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override;
  bool waits() const override { return link_.moving(); }

 private:
  void move(const char* what);

  MpiLink& link_;
  const std::function<void(const char*)> on_enter_;
  // Pages that no reduce_scatter has touched cost nothing: with thousands of ranks these are megabytes.
  std::unique_ptr<std::byte[]> staging_;
  int64_t staging_bytes_;
  std::vector<Transfer> transfers_;
};

}  // namespace lm
