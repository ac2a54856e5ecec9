// `lmlaunch chat`: a line of standard input is a turn. A terminal gets a prompt; through a pipe only the
// answers are written, one per line.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "base/log.h"
#include "launcher/worker/chat_prompt.h"
#include "launcher/worker/worker_commands.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 1024, kDefaultContext = 4096;

// Ctrl-C ends an answer, or the chat if none is being generated.
volatile std::sig_atomic_t interrupts = 0;

void on_interrupt(int) {
  interrupts = interrupts + 1;
}

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;  // without SA_RESTART: it interrupts the wait for a line, too
  sigaction(SIGINT, &action, nullptr);
}

// Reads lines of standard input. Not a stream, because a signal must interrupt the wait.
class Input {
 public:
  // False at the end of the input, or if the wait was interrupted.
  bool line(std::string& out) {
    const int before = interrupts;
    size_t end = 0;
    while ((end = read_.find('\n')) == std::string::npos) {
      char buffer[4096];
      const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR && interrupts == before) continue;
      if (n > 0) {
        read_.append(buffer, static_cast<size_t>(n));
        continue;
      }
      if (n < 0 || read_.empty()) return false;
      end = read_.size();  // a last line without a newline
      read_ += '\n';
      break;
    }
    out = read_.substr(0, end);
    read_.erase(0, end + 1);
    if (!out.empty() && out.back() == '\r') out.pop_back();
    return true;
  }

 private:
  std::string read_;
};

class Chat {
 public:
  Chat(const CommandLine& line, ChatPrompt& chat_prompt, int64_t context)
      : chat_prompt_(chat_prompt),
        system_(line.value("--system").value_or("")),
        context_(context),
        most_(line.integer("--max-tokens").value_or(kDefaultTokens)),
        sampling_(sampling_of(line)) {
    reset();
  }

  void reset() {
    messages_.clear();
    if (!system_.empty()) messages_.push_back({"system", system_});
  }

  // If a turn does not fit, nothing of it is kept.
  void turn(const std::string& said) {
    messages_.push_back({"user", said});
    const std::vector<int32_t> prompt = chat_prompt_.text().conversation(messages_);
    if (std::ssize(prompt) >= context_) {
      messages_.pop_back();
      log_line(
          fmt::format("this conversation has {} tokens, and there is room for {}: /reset begins a new one, "
                      "--context N makes more room",
                      prompt.size(), context_));
      return;
    }
    const int before = interrupts;
    AnswerOptions options{.most = most_, .sampling = sampling_};
    options.sampling.seed = sampling_.seed + messages_.size();  // a seed of its own for each turn
    options.stopped = [&] { return interrupts != before; };
    const auto answer = chat_prompt_.answer(prompt, options, [](const std::string& piece) {
      std::fputs(piece.c_str(), stdout);
      std::fflush(stdout);
    });
    std::printf("\n");
    std::fflush(stdout);
    messages_.push_back({"assistant", answer.text});
    if (answer.full)
      log_line(fmt::format(
          "the answer ends here: all {} tokens of --context are used; /reset begins a new conversation",
          context_));
  }

 private:
  ChatPrompt& chat_prompt_;
  std::string system_;
  int64_t context_, most_;
  Sampling sampling_;
  std::vector<ChatMessage> messages_;
};

constexpr const char* kHelp =
    "a line is a turn; /reset begins a new conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer";

// Executes a command that begins with a slash; false: end the chat.
bool obey(const std::string& word, Chat& chat) {
  if (word == "/exit") return false;
  if (word == "/reset") {
    chat.reset();
    log_line("new conversation");
  } else if (word == "/help") {
    log_line(kHelp);
  } else {
    log_line("unknown command " + word + "; " + kHelp);
  }
  return true;
}

}  // namespace

Exit chat_command(const CommandLine& line) {
  sampling_of(line);  // report mistakes before anything is loaded
  ChatPrompt chat_prompt(line);
  if (!chat_prompt.text().has_template())
    log_note("DATA-23",
             "the model has no chat template: turns are written as \"### Instruction\" and "
             "\"### Response\", as in training");
  if (chat_prompt.text().has_template() && chat_prompt.render() == Render::kPlain)
    log_note(
        "DATA-23",
        "this run was trained without the chat template (data.render = \"plain\"), and chat writes turns "
        "by it; `lmlaunch generate` prompts as the run was trained");
  const int64_t most = chat_prompt.spec().max_positions;
  const int64_t context =
      line.integer("--context").value_or(most > 0 ? std::min(most, kDefaultContext) : kDefaultContext);
  chat_prompt.load(context);
  Chat chat(line, chat_prompt, std::max<int64_t>(context, 2));
  const bool terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  if (terminal) log_line(kHelp);
  catch_interrupts();
  Input input;
  for (std::string said;;) {
    if (terminal) std::printf("> ");
    std::fflush(stdout);
    if (!input.line(said)) {
      if (terminal) std::printf("\n");
      return Exit::kDone;
    }
    if (said.find_first_not_of(" \t") == std::string::npos) continue;
    if (said[0] == '/' ? !obey(said, chat) : (chat.turn(said), false)) return Exit::kDone;
  }
}

}  // namespace lm
