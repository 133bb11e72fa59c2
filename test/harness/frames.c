// Writes the stack of a thread that gets a signal: a line for each frame, and then an empty line.
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static int place;

static void print(int number) {
  (void)number;
  const int before = errno;
  void* frames[100];
  backtrace_symbols_fd(frames, backtrace(frames, 100), place);
  if (write(place, "\n", 1) != 1) abort();
  errno = before;
}

int print_frames_on(int number, int descriptor) {
  place = descriptor;
  void* once[1];
  backtrace(once, 1); // loads libgcc, which a signal handler must not do
  struct sigaction action = {0};
  action.sa_handler = print;
  action.sa_flags = SA_RESTART;
  return sigaction(number, &action, 0);
}
