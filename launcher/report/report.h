// Runs as one HTML page, made only from the files of their directories (metrics.jsonl, plan.json,
// config.toml, log.txt, status.json): curves, memory against the plan, settings, notes, checkpoints. The page
// is one file without links; text from files is data in it, never markup. The CLI makes it, in C++ and around
// page.html, because training needs no Python, and a page matters most for a run that died. One thread.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "launcher/report/curves.h"

namespace lm {

// The record of a run's directory; "" if it is none.
class RunReport {
 public:
  explicit RunReport(std::string directory);

  // The files' present content, as page.html reads it.
  Json record();
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  Curves curves_;
};

std::string report_page(const std::vector<Json>& records);

// Renews <run>/report.html during the run: the CLI calls it between two checks of its ranks. Takes a small
// share of one core's time, however long the run. A run without a plan gets no page yet; a page that cannot
// be written is logged once, and tried again when the next is due.
class LiveReport {
 public:
  // `clock` returns seconds and never goes back; tests replace it.
  explicit LiveReport(const std::string& directory, double (*clock)() = monotonic_seconds);
  void refresh();  // if it is due
  void finish();   // always

 private:
  RunReport run_;
  std::string path_;
  double (*clock_)();
  double due_;  // by that clock
  bool said_ = false;
};

}  // namespace lm
