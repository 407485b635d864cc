/*
 * A guest that can be observed: init of the test VMs, a static program without a root disk.
 *
 * It counts ticks (about one a millisecond), keeps a buffer whose content it can change and hash on request, and answers one UDP datagram
 * per request on port 7:
 *
 *   count               -> ticks so far
 *   fill SEED FROM N    -> writes N pages of the buffer from page FROM with a pattern of SEED; answers "ok"
 *   echo N              -> N
 *   hash                -> hash over the whole buffer
 *   write DISK VALUE    -> writes VALUE into the first sector of disk number DISK and flushes it; answers "ok"
 *   read DISK           -> the value there
 *   random              -> a number from the hardware random generator
 *   power-off           -> ends the VM
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <net/route.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, BUFFER_PAGES = 8192, SECTOR = 512 };

static uint64_t *buffer;
static uint64_t ticks;

static void load_modules(const char *directory, int *loaded)
{
	DIR *entries = opendir(directory);
	struct dirent *entry;

	while (entries && (entry = readdir(entries))) {
		char path[512];
		size_t length = strlen(entry->d_name);

		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
		if (length > 3 && strcmp(entry->d_name + length - 3, ".ko") == 0) {
			int file = open(path, O_RDONLY | O_CLOEXEC);

			if (file >= 0 && syscall(SYS_finit_module, file, "", 0) == 0)
				++*loaded;
			close(file);
		} else {
			load_modules(path, loaded);
		}
	}
	if (entries)
		closedir(entries);
}

static void bring_up_network(void)
{
	int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq request = {.ifr_name = "eth0"};
	struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;

	address->sin_family = AF_INET;
	inet_aton("169.254.0.21", &address->sin_addr);
	if (ioctl(control, SIOCSIFADDR, &request))
		perror("address");
	inet_aton("255.255.255.252", &address->sin_addr);
	if (ioctl(control, SIOCSIFNETMASK, &request))
		perror("netmask");
	ioctl(control, SIOCGIFFLAGS, &request);
	request.ifr_flags |= IFF_UP;
	if (ioctl(control, SIOCSIFFLAGS, &request))
		perror("up");
	close(control);
}

static uint64_t hash_buffer(void)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (size_t i = 0; i < (size_t)BUFFER_PAGES * PAGE / sizeof *buffer; i++)
		hash = (hash ^ buffer[i]) * 0x100000001b3;
	return hash;
}

static void fill(uint64_t seed, uint64_t from, uint64_t count)
{
	for (uint64_t page = from; page < from + count && page < BUFFER_PAGES; page++)
		for (size_t i = 0; i < PAGE / sizeof *buffer; i++)
			buffer[page * (PAGE / sizeof *buffer) + i] = (seed + page) * 0x9e3779b97f4a7c15 + i;
}

static int disk(int number, int flags)
{
	char path[] = "/dev/vda";

	path[sizeof path - 2] += number;
	return open(path, flags | O_CLOEXEC);
}

static void answer(const char *request, char *reply, size_t size)
{
	uint64_t a, b, c;
	uint64_t sector[SECTOR / sizeof(uint64_t)] = {0};

	snprintf(reply, size, "error");
	if (strcmp(request, "count") == 0) {
		snprintf(reply, size, "%" PRIu64, ticks);
	} else if (sscanf(request, "echo %" SCNu64, &a) == 1) {
		snprintf(reply, size, "%" PRIu64, a);
	} else if (strcmp(request, "hash") == 0) {
		snprintf(reply, size, "%" PRIu64, hash_buffer());
	} else if (sscanf(request, "fill %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c) == 3) {
		fill(a, b, c);
		snprintf(reply, size, "ok");
	} else if (sscanf(request, "write %" SCNu64 " %" SCNu64, &a, &b) == 2) {
		int file = disk((int)a, O_WRONLY);

		sector[0] = b;
		if (file >= 0 && write(file, sector, SECTOR) == SECTOR && fsync(file) == 0)
			snprintf(reply, size, "ok");
		close(file);
	} else if (sscanf(request, "read %" SCNu64, &a) == 1) {
		int file = disk((int)a, O_RDONLY);

		if (file >= 0 && read(file, sector, SECTOR) == SECTOR)
			snprintf(reply, size, "%" PRIu64, sector[0]);
		close(file);
	} else if (strcmp(request, "random") == 0) {
		int file = open("/dev/hwrng", O_RDONLY | O_CLOEXEC);

		if (file >= 0 && read(file, &a, sizeof a) == sizeof a)
			snprintf(reply, size, "%" PRIu64, a);
		close(file);
	} else if (strcmp(request, "power-off") == 0) {
		reboot(LINUX_REBOOT_CMD_RESTART);
	}
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7)};
	struct pollfd waiting = {.events = POLLIN};
	int loaded;

	mkdir("/dev", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, "");
	int console = open("/dev/console", O_RDWR);
	for (int number = 0; console >= 0 && number < 3; number++)
		dup2(console, number);
	setvbuf(stdout, NULL, _IOLBF, 0);
	do {
		loaded = 0;
		load_modules("/modules", &loaded);
	} while (loaded);
	bring_up_network();
	buffer = mmap(NULL, (size_t)BUFFER_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	waiting.fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	int receive_bytes = 8 << 20; /* for what arrives while the VM stands still */
	setsockopt(waiting.fd, SOL_SOCKET, SO_RCVBUFFORCE, &receive_bytes, sizeof receive_bytes);
	if (buffer == MAP_FAILED || bind(waiting.fd, (struct sockaddr *)&address, sizeof address))
		perror("start");
	printf("test guest ready\n");

	for (;;) {
		char request[128], reply[64];
		struct sockaddr_in peer;
		socklen_t peer_length = sizeof peer;
		int ready = poll(&waiting, 1, 1);

		ticks++;
		if (ready <= 0)
			continue;
		ssize_t length = recvfrom(waiting.fd, request, sizeof request - 1, 0, (struct sockaddr *)&peer, &peer_length);
		if (length < 0)
			continue;
		request[length] = 0;
		answer(request, reply, sizeof reply);
		sendto(waiting.fd, reply, strlen(reply), 0, (struct sockaddr *)&peer, peer_length);
	}
}
