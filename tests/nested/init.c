/*
 * Init of the nested test VM: loads the modules, puts a scratch disk over the host's shared root file system, runs
 * the script it was given there, writes its exit status down and powers off.
 *
 *   init.directory=PATH   of the host, shared read-write: holds `script`, receives `status`
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PATH_BYTES = 512 };

static void die(const char *what)
{
	fprintf(stderr, "nested: %s: %s\n", what, strerror(errno));
	reboot(RB_POWER_OFF);
}

static void mount_at(const char *source, const char *target, const char *type, unsigned long flags, const char *data)
{
	mkdir(target, 0755);
	if (mount(source, target, type, flags, data))
		die(target);
}

static void load_modules(void)
{
	FILE *order = fopen("/modules/order", "r");
	char name[PATH_BYTES], path[PATH_BYTES + 16];

	while (order && fgets(name, sizeof name, order)) {
		int file;

		name[strcspn(name, "\n")] = 0;
		snprintf(path, sizeof path, "/modules/%s", name);
		file = open(path, O_RDONLY | O_CLOEXEC);
		if (file < 0 || syscall(SYS_finit_module, file, "", 0))
			fprintf(stderr, "nested: module %s: %s\n", name, strerror(errno));
		close(file);
	}
}

static void argument(const char *name, char *value, size_t size)
{
	static char line[4096];
	FILE *file = fopen("/proc/cmdline", "r");
	char *found;

	if (!file || !fgets(line, sizeof line, file) || !(found = strstr(line, name)))
		die(name);
	snprintf(value, size, "%s", found + strlen(name));
	value[strcspn(value, " \n")] = 0;
	fclose(file);
}

/* The host's root with a disk of our own over it, and the directory of this run as it is. */
static void enter_root(const char *directory)
{
	char target[PATH_BYTES + 16], source[PATH_BYTES + 16];

	mount_at("host", "/host", "virtiofs", 0, NULL);
	mount_at("/dev/vda", "/scratch", "ext4", MS_NOATIME, NULL);
	mkdir("/scratch/upper", 0755);
	mkdir("/scratch/work", 0755);
	mount_at("root", "/root", "overlay", 0, "lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work");
	snprintf(source, sizeof source, "/host%s", directory);
	snprintf(target, sizeof target, "/root%s", directory);
	mount_at(source, target, NULL, MS_BIND, NULL);
	mount_at("proc", "/root/proc", "proc", 0, NULL);
	mount_at("sys", "/root/sys", "sysfs", 0, NULL);
	mount_at("dev", "/root/dev", "devtmpfs", 0, NULL);
	mount_at("pts", "/root/dev/pts", "devpts", 0, "ptmxmode=666");
	mount_at("shm", "/root/dev/shm", "tmpfs", 0, NULL);
	mount_at("run", "/root/run", "tmpfs", 0, "mode=755");
	mount_at("cgroup", "/root/sys/fs/cgroup", "cgroup2", 0, NULL);
	mkdir("/root/nested", 0755);
	mount_at("/scratch", "/root/nested", NULL, MS_BIND, NULL);
	if (chroot("/root") || chdir("/"))
		die("chroot");
}

static int run(const char *directory)
{
	pid_t child = fork();
	int status = 0;

	if (child == 0) {
		char script[PATH_BYTES + 16];
		int output = open("/dev/hvc0", O_WRONLY), input = open("/dev/null", O_RDONLY);

		setsid();
		dup2(input, 0);
		dup2(output, 1);
		dup2(output, 2);
		snprintf(script, sizeof script, "%s/script", directory);
		execl("/bin/sh", "sh", script, (char *)NULL);
		_exit(127);
	}
	for (;;) {
		pid_t ended = wait(&status);

		if (ended == child || (ended < 0 && errno != EINTR))
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	}
}

int main(void)
{
	char directory[PATH_BYTES], path[PATH_BYTES + 16];
	FILE *result;

	mount_at("proc", "/proc", "proc", 0, NULL);
	mount_at("dev", "/dev", "devtmpfs", 0, NULL);
	load_modules();
	argument("init.directory=", directory, sizeof directory);
	enter_root(directory);
	snprintf(path, sizeof path, "%s/status", directory);
	int status = run(directory);
	result = fopen(path, "w");
	if (!result)
		die("status");
	fprintf(result, "%d\n", status);
	fclose(result);
	sync();
	reboot(RB_POWER_OFF);
}
