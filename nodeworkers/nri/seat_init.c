/* seat-init: the first process of a container with a seat. Runs the container's command line as a child, ends it and starts
 * it anew as the node orders, and else behaves as if it were that command line: signals, zombies, exit status.
 *
 *   seat-init FOLDER PROGRAM [ARGUMENT...]
 *
 * FOLDER/order, which the node replaces by rename and the container cannot write, holds one line:
 *
 *   run        the child is to run: it is started if there is none. One that ends by itself ends the container with it.
 *   hold       a child that runs goes on, and none is started: one that ends is waited for by nobody, and the container stays.
 *   down N     the child is to end: SIGTERM, and after N seconds SIGKILL for everything in the container.
 *
 * Anything else, or no file, changes nothing; before the first order nothing is started. A process that is started asks for
 * the order once more before it becomes PROGRAM. So whoever writes `hold` or `down`, and then finds no process beside
 * seat-init in the container, knows that none will be before the next `run`.
 *
 * Without libc, so that it is small and runs in every image. For `seat_init.py`, which builds it and writes the orders.
 */
#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/signal.h>
#include <linux/time_types.h>
#include <linux/wait.h>

#define IN_CHANGES (0x8 | 0x40 | 0x80 | 0x100 | 0x200) /* closed after writing, moved, created, deleted: inotify(7) */
#define IN_FLAGS (O_NONBLOCK | O_CLOEXEC)
#define TIOCGPGRP 0x540f
#define TIOCSPGRP 0x5410
#define SIGNALFD_INFO 128 /* bytes of a signalfd_siginfo; the number comes first */
#define MOST_GRACE 86400
#define LOOK_MS 1000     /* how often the order is read though inotify says nothing */
#define NO_INOTIFY_MS 50 /* where there are no inotify instances left */
#define CLEAR_MS 10

typedef long word;
typedef unsigned long uword;

enum { NONE, RUN, HOLD, DOWN };

struct order {
    int kind;
    word grace_ms;
};

static char *const *arguments, *const *environment;
static const char *folder;
static uword first_mask; /* signals that were blocked when we began */
static int own_pid;

/* --- system calls --- */

#if defined(__x86_64__)
static word call6(word n, word a, word b, word c, word d, word e, word f)
{
    word result;
    register word r10 __asm__("r10") = d;
    register word r8 __asm__("r8") = e;
    register word r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n");
#elif defined(__aarch64__)
static word call6(word n, word a, word b, word c, word d, word e, word f)
{
    register word x8 __asm__("x8") = n;
    register word x0 __asm__("x0") = a;
    register word x1 __asm__("x1") = b;
    register word x2 __asm__("x2") = c;
    register word x3 __asm__("x3") = d;
    register word x4 __asm__("x4") = e;
    register word x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n and sp, x0, #-16\n bl begin\n");
#else
#error "seat-init knows x86-64 and arm64"
#endif

#define CALL(n, ...) CALL_(n, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define CALL_(n, a, b, c, d, e, f, ...) call6(__NR_##n, (word)(a), (word)(b), (word)(c), (word)(d), (word)(e), (word)(f))

void *memset(void *at, int value, uword size) /* gcc may ask for these two wherever it likes */
{
    for (volatile char *each = at; size--;)
        *each++ = (char)value;
    return at;
}

void *memcpy(void *to, const void *from, uword size)
{
    volatile char *each = to;
    for (const char *source = from; size--;)
        *each++ = *source++;
    return to;
}

static void leave(int status)
{
    for (;;)
        CALL(exit_group, status);
}

static word now_ms(void)
{
    struct __kernel_timespec time;
    CALL(clock_gettime, 1 /* monotonic */, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* --- text --- */

struct text {
    char bytes[1024];
    uword size;
};

static void add(struct text *text, const char *more)
{
    while (*more && text->size < sizeof text->bytes - 1)
        text->bytes[text->size++] = *more++;
}

static void add_number(struct text *text, word number)
{
    char digits[24], *at = digits + sizeof digits;
    *--at = 0;
    do
        *--at = '0' + (char)(number % 10);
    while (number /= 10);
    add(text, at);
}

/* One line for people. It is left out where writing it would have to wait: the other end may be away. */
static void say(struct text *text)
{
    struct pollfd out = {2, POLLOUT, 0};
    struct __kernel_timespec none = {0, 0};
    text->bytes[text->size++] = '\n';
    if (CALL(ppoll, &out, 1, &none, 0, 8) == 1 && out.revents == POLLOUT)
        CALL(write, 2, text->bytes, text->size);
}

static void tell(const char *sentence)
{
    struct text text = {.size = 0};
    add(&text, "seat-init: ");
    add(&text, sentence);
    say(&text);
}

static const char *number_of(const char *at, word *number)
{
    const char *begin = at;
    *number = 0;
    while (*at >= '0' && *at <= '9' && at - begin < 9)
        *number = *number * 10 + (*at++ - '0');
    return at == begin ? 0 : at;
}

static const char *after(const char *text, const char *prefix)
{
    while (*prefix)
        if (*text++ != *prefix++)
            return 0;
    return text;
}

/* --- the order --- */

/* 0 where there is none that can be read. */
static int read_order(struct order *order)
{
    char path[4096], line[32];
    struct order found = {NONE, 0};
    const char *rest;
    word file, size, seconds;
    uword at = 0;
    for (const char *part = folder; *part; part++)
        if (at < sizeof path - 8)
            path[at++] = *part;
    memcpy(path + at, "/order", 7);
    file = CALL(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return 0;
    size = CALL(read, file, line, sizeof line - 1);
    CALL(close, file);
    if (size < 1 || line[size - 1] != '\n')
        return 0;
    line[size - 1] = 0;
    if ((rest = after(line, "run")) && !*rest)
        found.kind = RUN;
    else if ((rest = after(line, "hold")) && !*rest)
        found.kind = HOLD;
    else if ((rest = after(line, "down ")) && (rest = number_of(rest, &seconds)) && !*rest && seconds <= MOST_GRACE) {
        found.kind = DOWN;
        found.grace_ms = seconds * 1000;
    }
    if (found.kind == NONE)
        return 0;
    *order = found;
    return 1;
}

/* --- the child --- */

static void refuse(const char *program, word error)
{
    struct text text = {.size = 0};
    add(&text, "seat-init: exec: \"");
    add(&text, program);
    add(&text, "\": ");
    switch (-error) {
    case 0: add(&text, "executable file not found in $PATH"); break;
    case ENOENT: add(&text, "no such file or directory"); break;
    case ENOTDIR: add(&text, "not a directory"); break;
    case EACCES: add(&text, "permission denied"); break;
    case ENOEXEC: add(&text, "exec format error"); break;
    case E2BIG: add(&text, "argument list too long"); break;
    default: add(&text, "error "); add_number(&text, -error);
    }
    say(&text);
    leave(error == 0 || error == -ENOENT || error == -ENOTDIR ? 127 : 126);
}

/* Becomes the container's program: by its path, or found by PATH as runc finds it. */
static void become(void)
{
    const char *program = arguments[0], *paths = 0;
    word error = 0;
    for (const char *each = program; *each; each++)
        if (*each == '/')
            refuse(program, CALL(execve, program, arguments, environment));
    for (char *const *each = environment; *each && !paths; each++)
        paths = after(*each, "PATH=");
    while (paths && *paths && *program) {
        char path[4096];
        uword at = 0;
        int absolute = *paths == '/'; /* neither runc nor anybody else takes programs from where a process happens to be */
        for (; *paths && *paths != ':'; paths++)
            if (at < sizeof path - 1)
                path[at++] = *paths;
        if (*paths)
            paths++;
        if (at < sizeof path - 1)
            path[at++] = '/';
        for (const char *each = program; *each; each++)
            if (at < sizeof path - 1)
                path[at++] = *each;
        path[at] = 0;
        if (absolute && at < sizeof path - 1) {
            word tried = CALL(execve, path, arguments, environment);
            if (tried != -ENOENT && tried != -ENOTDIR) {
                error = tried;
                if (tried != -EACCES)
                    break;
            }
        }
    }
    refuse(program, error);
}

/* The pid of a new child, or 0. It waits before it becomes the program until the order has been read once more. */
static int start(void)
{
    int gate[2], group;
    char go = 0;
    struct order order = {NONE, 0};
    word pid;
    if (CALL(pipe2, gate, O_CLOEXEC) < 0) {
        tell("a pipe cannot be made: too many files are open");
        leave(126);
    }
    pid = CALL(clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) {
        CALL(prctl, PR_SET_PDEATHSIG, SIGKILL); /* where we are not the first process, nobody else would end it */
        CALL(close, gate[1]);
        CALL(setpgid, 0, 0);
        if (CALL(ioctl, 0, TIOCGPGRP, &group) == 0) { /* a terminal: ^C is for the program alone */
            group = (int)CALL(getpid);
            CALL(ioctl, 0, TIOCSPGRP, &group);
        }
        if (CALL(read, gate[0], &go, 1) != 1)
            leave(0);
        CALL(rt_sigprocmask, SIG_SETMASK, &first_mask, 0, 8);
        become();
    }
    if (pid < 0) {
        tell("no process can be started: the container has too many");
        leave(126);
    }
    CALL(close, gate[0]);
    if (read_order(&order) && order.kind == RUN) {
        CALL(write, gate[1], &go, 1);
        CALL(close, gate[1]);
        return (int)pid;
    }
    CALL(close, gate[1]);
    CALL(wait4, pid, 0, 0, 0);
    return 0;
}

/* --- everything else in the container --- */

static int parent_of(const char *name)
{
    struct text path = {.size = 0};
    char stat[512];
    word file, size, parent = 0;
    add(&path, "/proc/");
    add(&path, name);
    add(&path, "/stat");
    path.bytes[path.size] = 0;
    file = CALL(openat, AT_FDCWD, path.bytes, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    size = CALL(read, file, stat, sizeof stat - 1);
    CALL(close, file);
    for (stat[size < 0 ? 0 : size] = 0; size > 0; size--) /* its name, in brackets, may hold anything */
        if (stat[size - 1] == ')' && stat[size] && stat[size + 1] && stat[size + 2]) {
            number_of(stat + size + 3, &parent);
            break;
        }
    return (int)parent;
}

/* SIGKILL for all processes of the container but us; where it shares its processes' names with others, for our children:
 * theirs are ours when they are gone.
 */
static void kill_all(void)
{
    struct {
        unsigned long inode;
        long offset;
        unsigned short size;
        unsigned char type;
        char name[];
    } *entry;
    char entries[4096] __attribute__((aligned(8)));
    word proc, size, pid;
    if (own_pid == 1) {
        CALL(kill, -1, SIGKILL);
        return;
    }
    proc = CALL(openat, AT_FDCWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (proc >= 0 && (size = CALL(getdents64, proc, entries, sizeof entries)) > 0)
        for (word at = 0; at < size; at += entry->size) {
            const char *end;
            entry = (void *)(entries + at);
            end = number_of(entry->name, &pid);
            if (end && !*end && parent_of(entry->name) == own_pid)
                CALL(kill, pid, SIGKILL);
        }
    if (proc >= 0)
        CALL(close, proc);
}

static int status_of(int status)
{
    return status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff;
}

static int terminates(int number) /* by default: signal(7) */
{
    return number != SIGCHLD && number != SIGCONT && number != SIGURG && number != SIGWINCH && number != SIGTSTP &&
           number != SIGTTIN && number != SIGTTOU;
}

static void serve(int signals, int changes)
{
    struct order order = {NONE, 0};
    int child = 0, told = 0;
    int asked = 0;    /* the child has been sent SIGTERM by order */
    int ending = 0;   /* somebody else wants the container to end: the kubelet */
    int clearing = 0; /* the child ended by order, others may be left */
    int started = 0;
    word kill_at = 0;
    for (;;) {
        char drain[4096] __attribute__((aligned(8)));
        struct pollfd waited[2] = {{signals, POLLIN, 0}, {changes, POLLIN, 0}};
        struct __kernel_timespec timeout;
        word wait = changes < 0 ? NO_INOTIFY_MS : LOOK_MS, size;
        int status, pid;

        while ((size = CALL(read, signals, drain, sizeof drain)) > 0)
            for (word at = 0; at < size; at += SIGNALFD_INFO) {
                int number = *(int *)(drain + at);
                if (number == SIGCHLD)
                    continue;
                if ((!child || asked || order.kind != RUN) && terminates(number)) {
                    ending = 1;
                    if (!child) {
                        if (own_pid != 1)
                            kill_all();
                        leave(128 + number);
                    }
                }
                if (child)
                    CALL(kill, child, number);
            }
        while (changes >= 0 && CALL(read, changes, drain, sizeof drain) > 0)
            ;
        if (!read_order(&order) && order.kind == NONE && !told) {
            tell("nothing says yet whether the seat is granted: the server starts when it is");
            told = 1;
        }
        while ((pid = (int)CALL(wait4, -1, &status, WNOHANG, 0)) > 0)
            if (pid == child) {
                struct text text = {.size = 0};
                read_order(&order); /* whoever ended it may have ordered so in the meantime */
                if (ending || (order.kind == RUN && !asked))
                    leave(status_of(status));
                child = asked = 0;
                clearing = 1;
                add(&text, "seat-init: the server ended with status ");
                add_number(&text, status_of(status));
                add(&text, " without its seat: it starts anew when the seat is granted");
                say(&text);
                told = 1;
            }
        if (pid < 0)
            clearing = 0; /* ECHILD */
        if (clearing) {
            kill_all();
            wait = CLEAR_MS;
        } else if (!child && order.kind == RUN) {
            if (started)
                tell("the seat is granted: the server starts anew");
            child = start();
            started |= child;
            wait = child ? wait : NO_INOTIFY_MS;
        } else if (!child && !told) {
            tell("the seat is not granted yet: the server starts when it is");
            told = 1;
        } else if (child && order.kind == DOWN) {
            if (!asked) {
                kill_at = now_ms() + order.grace_ms;
                CALL(kill, child, SIGTERM);
                CALL(kill, child, SIGCONT);
                asked = 1;
            } else if (now_ms() + order.grace_ms < kill_at)
                kill_at = now_ms() + order.grace_ms; /* less patience than before */
        }
        if (child && asked) {
            word left = kill_at - now_ms();
            if (left <= 0) {
                kill_all();
                left = CLEAR_MS;
            }
            wait = left < wait ? left : wait;
        }
        timeout.tv_sec = wait / 1000;
        timeout.tv_nsec = wait % 1000 * 1000000;
        CALL(ppoll, waited, changes < 0 ? 1 : 2, &timeout, 0, 8);
    }
}

__attribute__((used, noreturn)) void begin(word *stack)
{
    word count = stack[0], signals, changes;
    char *const *all = (char *const *)(stack + 1);
    uword every = ~0UL;
    if (count < 3) {
        tell("usage: seat-init FOLDER PROGRAM [ARGUMENT...]");
        leave(2);
    }
    folder = all[1];
    arguments = all + 2;
    environment = all + count + 1;
    own_pid = (int)CALL(getpid);
    CALL(rt_sigprocmask, SIG_SETMASK, &every, &first_mask, 8);
    CALL(prctl, PR_SET_CHILD_SUBREAPER, 1);
    signals = CALL(signalfd4, -1, &every, 8, IN_FLAGS);
    if (signals < 0) {
        tell("signals cannot be received: no file can be opened");
        leave(126);
    }
    changes = CALL(inotify_init1, IN_FLAGS);
    if (changes >= 0 && CALL(inotify_add_watch, changes, folder, IN_CHANGES) < 0)
        changes = -1;
    serve((int)signals, (int)changes);
    __builtin_unreachable();
}
