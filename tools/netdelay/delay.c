/* delay QUEUE MICROSECONDS: hold every packet of a netfilter queue for a time, then let it pass.
 *
 * For kernels without netem. Packets stay in the kernel; only their numbers come here. A line is
 * printed once the queue is taken.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <libnetfilter_queue/libnetfilter_queue.h>

enum { SLOTS = 1 << 16, SOCKET_BYTES = 8 << 20 };

struct held {
	uint32_t number;
	int64_t until_ns;
};

static struct held ring[SLOTS];
static unsigned first, past;
static int64_t delay_ns;

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int take(struct nfq_q_handle *queue, struct nfgenmsg *message, struct nfq_data *packet,
		void *unused)
{
	struct nfqnl_msg_packet_hdr *header = nfq_get_msg_packet_hdr(packet);

	(void)queue, (void)message, (void)unused;
	if (header && past - first < SLOTS) {
		ring[past % SLOTS] = (struct held){ ntohl(header->packet_id), now_ns() + delay_ns };
		past++;
	}
	return 0;
}

static void receive(struct nfq_handle *handle, int fd)
{
	static char buffer[1 << 17];
	ssize_t size;

	while ((size = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0)
		nfq_handle_packet(handle, buffer, (int)size);
}

int main(int count, char **words)
{
	struct nfq_handle *handle = nfq_open();
	struct nfq_q_handle *queue;
	int fd;

	if (count != 3 || !handle)
		return perror("delay"), 1;
	delay_ns = atoll(words[2]) * 1000;
	queue = nfq_create_queue(handle, (uint16_t)atoi(words[1]), take, NULL);
	if (!queue || nfq_set_mode(queue, NFQNL_COPY_META, 0) < 0)
		return perror("delay: queue"), 1;
	nfq_set_queue_maxlen(queue, SLOTS);
	nfq_set_queue_flags(queue, NFQA_CFG_F_GSO, NFQA_CFG_F_GSO);
	nfnl_rcvbufsiz(nfq_nfnlh(handle), SOCKET_BYTES);
	prctl(PR_SET_TIMERSLACK, 1000);
	fd = nfq_fd(handle);
	puts("ready");
	fflush(stdout);
	for (;;) {
		struct pollfd ready = { fd, POLLIN, 0 };
		struct timespec wait, *limit = NULL;

		if (first != past) {
			int64_t left = ring[first % SLOTS].until_ns - now_ns();

			left = left < 0 ? 0 : left;
			wait = (struct timespec){ left / 1000000000, left % 1000000000 };
			limit = &wait;
		}
		if (ppoll(&ready, 1, limit, NULL) > 0)
			receive(handle, fd);
		while (first != past && ring[first % SLOTS].until_ns <= now_ns()) {
			nfq_set_verdict(queue, ring[first % SLOTS].number, NF_ACCEPT, 0, NULL);
			first++;
		}
	}
}
