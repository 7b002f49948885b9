/* Entry point: `slot-helper zygote FD`. All other roles are forks of the zygote. */
#include "slot.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments) {
    if (count != 3 || strcmp(arguments[1], "zygote")) return 2;
    int control = atoi(arguments[2]);
    command_line = arguments[0];
    command_line_size = (size_t)(arguments[2] + strlen(arguments[2]) + 1 - arguments[0]);
    signal(SIGPIPE, SIG_IGN);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    return zygote_main(control);
}
