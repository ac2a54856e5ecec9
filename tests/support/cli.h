// Runs the CLI as a process in a directory of its own, beside a fake rank. One thread.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace lm {

struct CliResult {
  int code = -1;  // exit code; -1 when a signal ended it
  int signal = 0;
  std::string out, err;
  std::string last_line() const;  // of err
};

class Cli {
 public:
  Cli();   // makes the directory, with lmlaunch, lmlaunch-cpu (the fake) and a model directory "model"
  ~Cli();  // removes it
  Cli(const Cli&) = delete;
  Cli& operator=(const Cli&) = delete;

  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  void add_cuda_program() const;  // lmlaunch-cuda, the fake one, too
  void write(const std::string& name, const std::string& text) const;
  std::string read(const std::string& name) const;
  bool exists(const std::string& name) const;
  // A valid configuration whose run goes to "run"; `more` is appended.
  void write_config(const std::string& name, const std::string& more = "") const;

  CliResult run(const std::vector<std::string>& arguments, const std::string& script = "done",
                const std::vector<std::string>& environment = {});

  // In steps: start, send signals, finish.
  void start(const std::vector<std::string>& arguments, const std::string& script,
             const std::vector<std::string>& environment = {});
  void wait_for(const std::string& text);  // on stderr; throws after a minute
  void send(int signal) const;
  pid_t pid() const { return pid_; }
  pid_t child() const;  // the CLI's child; 0 if it has none
  CliResult finish();

 private:
  void drain(int timeout_ms);
  std::string directory_;
  pid_t pid_ = 0;
  int out_ = -1, err_ = -1;
  CliResult result_;
};

}  // namespace lm
