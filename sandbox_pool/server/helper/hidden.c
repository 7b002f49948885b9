/* Keeps the programs that a shell starts out of its memory and its descriptors. They have its user id, and could speak for
 * it, or change what it runs next. PR_SET_DUMPABLE keeps them out; but an exec forgets it, so the shell must have it set
 * while it is being started, or right after. */
#include "slot.h"

#include <errno.h>
#include <signal.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

gid_t other_group(gid_t group) { return group == 65533 ? 65532 : 65533; }

/* An exec that changes the group for files, because it was another than the effective one, leaves a process that is not
 * dumpable. False where the kernel lets this user have one group only. */
bool leave_group(void) {
    gid_t group = getegid(), other = other_group(group);
    syscall(SYS_setresgid, -1, -1, other); /* refused after take_run_uid(), which did it */
    setfsgid(other);
    return (gid_t)setfsgid((gid_t)-1) == other;
}

void enter_group(void) { setfsgid(getegid()); }

#ifdef __x86_64__

bool offer_to_be_hidden(void) { return ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0; }

/* Waits for it to stop; the signal that did it, or 0 when it has ended, which is left to be reaped. */
static int next_stop(pid_t pid) {
    siginfo_t info = {0};
    while (waitid(P_PID, (id_t)pid, &info, WEXITED | WSTOPPED | WNOWAIT) && errno == EINTR) {}
    return info.si_code == CLD_TRAPPED ? info.si_status : 0;
}

/* On to where a system call begins or ends. */
static bool next_call(pid_t pid) {
    for (int signal = 0;;) {
        if (ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(long)signal)) return false;
        signal = next_stop(pid);
        if (!signal || signal == (SIGTRAP | 0x80)) return signal != 0;
    }
}

/* Puts a call of ours before the first one that the program makes. */
void hide_traced(pid_t pid) {
    struct user_regs_struct first, ours;
    if (!next_stop(pid)) return;
    bool begun = ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL)) == 0 &&
                 next_call(pid) && ptrace(PTRACE_GETREGS, pid, NULL, &first) == 0;
    if (begun) {
        ours = first;
        ours.orig_rax = SYS_prctl;
        ours.rdi = PR_SET_DUMPABLE;
        ours.rsi = ours.rdx = ours.r10 = ours.r8 = 0;
        first.rip -= 2; /* the instruction once more, with what was in its registers */
        first.rax = first.orig_rax;
        first.orig_rax = (unsigned long long)-1;
        if (ptrace(PTRACE_SETREGS, pid, NULL, &ours) || !next_call(pid) || ptrace(PTRACE_SETREGS, pid, NULL, &first))
            kill(pid, SIGKILL); /* somebody else is doing the same */
    }
    ptrace(PTRACE_DETACH, pid, NULL, NULL);
}

#else

bool offer_to_be_hidden(void) { return false; }
void hide_traced(pid_t pid) { (void)pid; }

#endif
