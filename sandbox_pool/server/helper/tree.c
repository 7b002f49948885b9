/* Finding and killing every descendant of a process, also those that called setsid or lost their parent: a keeper is
 * a child subreaper, so whatever its command leaves behind is still below it. */
#include "slot.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct process {
    pid_t pid, parent;
    bool dead, below;
};

static bool read_process(const char *name, struct process *process) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.16s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = '\0';
    /* The name in parentheses may hold anything, a parenthesis too: what follows the last one is ours. */
    char *after = strrchr(text, ')'), state;
    if (!after || sscanf(after + 1, " %c %d", &state, &process->parent) != 2) return false;
    process->pid = atoi(name);
    process->dead = state == 'Z' || state == 'X';
    process->below = false;
    return true;
}

static size_t list_processes(struct process **list) {
    DIR *proc = opendir("/proc");
    size_t count = 0, capacity = 0;
    *list = NULL;
    if (!proc) return 0;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        if (count == capacity) {
            capacity = capacity ? capacity * 2 : 64;
            *list = realloc(*list, capacity * sizeof **list);
            if (!*list) _exit(71);
        }
        if (read_process(entry->d_name, &(*list)[count])) count++;
    }
    closedir(proc);
    return count;
}

/* Marks what is below `ancestor`; a parent may come after its child in the list, hence until nothing changes. */
static void mark_below(struct process *list, size_t count, pid_t ancestor) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < count; i++) {
            if (list[i].below || list[i].pid == ancestor) continue;
            bool below = list[i].parent == ancestor;
            for (size_t j = 0; !below && j < count; j++) below = list[j].below && list[j].pid == list[i].parent;
            if (below) list[i].below = changed = true;
        }
    }
}

static int signal_below(pid_t ancestor, int signal_number) {
    struct process *list;
    size_t count = list_processes(&list);
    int reached = 0;
    mark_below(list, count, ancestor);
    for (size_t i = 0; i < count; i++)
        if (list[i].below && !list[i].dead && kill(list[i].pid, signal_number) == 0) reached++;
    free(list);
    return reached;
}

/* A stopped process cannot fork: once two passes reach the same number, nothing new appears, and all can be killed. */
int kill_descendants(pid_t ancestor) {
    int before = -1, reached = signal_below(ancestor, SIGSTOP);
    for (int pass = 0; reached != before && pass < 100; pass++) {
        before = reached;
        reached = signal_below(ancestor, SIGSTOP);
    }
    for (int pass = 0; pass < 100 && signal_below(ancestor, SIGKILL) > 0; pass++) usleep(200);
    return reached;
}

int count_processes(void) {
    struct process *list;
    size_t count = list_processes(&list);
    free(list);
    return (int)count;
}
