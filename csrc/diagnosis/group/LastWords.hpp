// What a process says when a signal is about to end it while it waits for other ranks.
#pragma once

namespace torchcomms_pg {

// Sets whether installLastWords() changes what signals do. By default it does.
void allowLastWords(bool on);

// Has this process print whom it waits for when SIGTERM comes, and in which operation SIGABRT ends
// it, and dump the flight recorder. A process that SIGABRT ends also leaves word in its groups.
// Before SIGTERM goes on, half a second passes at least, since other ranks may ask for this rank's
// place. Idempotent; Thread-safe.
void installLastWords();

}  // namespace torchcomms_pg
