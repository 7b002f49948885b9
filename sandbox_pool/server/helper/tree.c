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
    const char *begun = " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (!after || sscanf(after + 1, begun, &state, &process->parent, &process->started) != 3) return false;
    process->pid = atoi(name);
    process->dead = state == 'Z' || state == 'X';
    process->below = false;
    return true;
}

static struct processes list_processes(void) {
    struct processes all = {NULL, 0};
    DIR *proc = opendir("/proc");
    if (!proc) return all;
    size_t capacity = 0;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        if (all.count == capacity) {
            capacity = capacity ? capacity * 2 : 64;
            all.list = realloc(all.list, capacity * sizeof *all.list);
            if (!all.list) _exit(71);
        }
        if (read_process(entry->d_name, &all.list[all.count])) all.count++;
    }
    closedir(proc);
    return all;
}

static bool is_among(const struct processes *known, const struct process *process) {
    for (size_t i = 0; known && i < known->count; i++)
        if (known->list[i].pid == process->pid && known->list[i].started == process->started) return true;
    return false;
}

/* Marks what is below `ancestor`, but not below what is spared; a parent may come after its child in the list, hence until
 * nothing changes. */
static void mark_below(struct processes *all, pid_t ancestor, const struct processes *spared) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < all->count; i++) {
            struct process *process = &all->list[i];
            if (process->below || process->pid == ancestor || is_among(spared, process)) continue;
            bool below = process->parent == ancestor;
            for (size_t j = 0; !below && j < all->count; j++)
                below = all->list[j].below && all->list[j].pid == process->parent;
            if (below) process->below = changed = true;
        }
    }
}

/* All of them that live, to be freed by the caller. */
struct processes processes_below(pid_t ancestor, const struct processes *spared) {
    struct processes all = list_processes();
    mark_below(&all, ancestor, spared);
    size_t kept = 0;
    for (size_t i = 0; i < all.count; i++)
        if (all.list[i].below && !all.list[i].dead) all.list[kept++] = all.list[i];
    all.count = kept;
    return all;
}

/* The list of a process's children, to be asked again and again; of its only thread. */
int open_children(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", pid, pid);
    return move_high(open(path, O_RDONLY | O_CLOEXEC));
}

/* Whether there is a child besides this one, dead ones too. A kernel that cannot tell says yes. */
bool has_children(int children, pid_t except) {
    char text[64], expected[32];
    ssize_t n = pread(children, text, sizeof text - 1, 0);
    if (n < 0) return true;
    text[n] = '\0';
    snprintf(expected, sizeof expected, "%d ", except);
    return n > 0 && strcmp(text, expected) != 0;
}

static int signal_below(pid_t ancestor, int signal_number, const struct processes *spared) {
    struct processes all = list_processes();
    int reached = 0;
    mark_below(&all, ancestor, spared);
    for (size_t i = 0; i < all.count; i++)
        if (all.list[i].below && !all.list[i].dead && kill(all.list[i].pid, signal_number) == 0) reached++;
    free(all.list);
    return reached;
}

static int kill_until_none(pid_t ancestor, const struct processes *spared, int passes) {
    int reached = 0;
    for (int pass = 0; pass < passes && (reached = signal_below(ancestor, SIGKILL, spared)) > 0; pass++) usleep(200);
    return reached;
}

/* A stopped process cannot fork: once two passes reach the same number, nothing new appears, and all can be killed.
 * gVisor hangs up a process group when one of it ends and another is stopped, and what is spared may be in it: beside that
 * only what forks faster than it can be killed is stopped. */
int kill_descendants(pid_t ancestor, const struct processes *spared) {
    if (spared && spared->count && kill_until_none(ancestor, spared, 50) == 0) return 0;
    int before = -1, reached = signal_below(ancestor, SIGSTOP, spared);
    for (int pass = 0; reached != before && pass < 100; pass++) {
        before = reached;
        reached = signal_below(ancestor, SIGSTOP, spared);
    }
    kill_until_none(ancestor, spared, 100);
    return reached;
}

int count_processes(void) {
    struct processes all = list_processes();
    free(all.list);
    return (int)all.count;
}
