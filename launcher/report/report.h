// Runs as one page for a browser, made from what their directories hold (metrics.jsonl, plan.json,
// config.toml, log.txt, status.json) and from nothing else: curves, memory against the plan, settings, notes,
// checkpoints. The page is one file without links; text from files is data in it, never markup. Made by the
// door, in C++ and around page.html, because training needs no Python and a page for a run that died is
// wanted most. One thread.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "launcher/report/curves.h"

namespace lm {

// Of a run's directory; "" for one that is none.
class RunReport {
 public:
  explicit RunReport(std::string directory);

  // What the files hold now, as page.html reads it.
  Json record();
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  Curves curves_;
};

std::string report_page(const std::vector<Json>& records);

// <run>/report.html while the run goes on: the door calls between two looks at its ranks. Takes a small share
// of one core's time, however long the run. A run that has no plan yet gets no page; one that cannot be
// written is said once, and tried again when the next is due.
class LiveReport {
 public:
  // `clock` gives seconds that only grow; tests have one of their own.
  explicit LiveReport(const std::string& directory, double (*clock)() = monotonic_seconds);
  void refresh();  // where it is due
  void finish();   // in any case

 private:
  RunReport run_;
  std::string path_;
  double (*clock_)();
  double due_;  // by that clock
  bool said_ = false;
};

}  // namespace lm
