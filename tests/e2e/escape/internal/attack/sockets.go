package attack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// timeout bounds what an attack waits for an answer.
const timeout = 3 * time.Second

func sockets() []Attack {
	return []Attack{
		{
			Attempt: suite.Attempt{Name: "sockets: abstract sockets of the node", Does: "connects to every abstract unix socket that it can see, as those of containerd's shims once were",
				Success: "it is connected"},
			run: func(e *Env) (string, error) { return connectAbstract(e) },
		},
		{
			Attempt: suite.Attempt{Name: "sockets: abstract socket of a roommate", Does: "connects to an abstract unix socket of another sandbox of its agent",
				Success: "the other sandbox answers", Expected: suite.Network},
			NeedsRoommate: true, Unprovable: unprovableHere,
			run: func(e *Env) (string, error) { return askAbstract(e) },
		},
		{
			Attempt: suite.Attempt{Name: "sockets: sockets of the node in the file system", Does: "looks for containerd's socket and others in the usual places", Success: "it is connected"},
			run: func(*Env) (string, error) {
				return first([]string{"/run/containerd/containerd.sock", "/run/fsb-local/containerd/containerd.sock", "/var/run/docker.sock", "/run/systemd/private",
					"/run/dbus/system_bus_socket", "/var/lib/kubelet/pod-resources/kubelet.sock", "/run/crio/crio.sock"}, connectUnix)
			},
			Unprovable: "the open container has a file system of its own",
		},
		{
			Attempt: suite.Attempt{Name: "sockets: packets of its roommates", Does: "reads the packets of the network that it shares with its agent, as root", Success: "it has such a socket"},
			By:      Root, run: func(*Env) (string, error) { return openPackets() },
		},
		{
			Attempt: suite.Attempt{Name: "sockets: forged packets", Does: "opens raw sockets of IPv4 and IPv6, to send packets with addresses of others", Success: "it has such a socket"},
			By:      Root, run: func(*Env) (string, error) { return first([]int{unix.AF_INET, unix.AF_INET6}, openRaw) },
		},
		{
			Attempt: suite.Attempt{Name: "sockets: packets as an ordinary user", Does: "reads the packets of the network that it shares with its agent", Success: "it has such a socket"},
			By:      Mere, Unprovable: "no ordinary user may, also in an open container", run: func(*Env) (string, error) { return openPackets() },
		},
		{
			Attempt: suite.Attempt{Name: "sockets: change the network", Does: "takes down an interface, adds an address and a filter", Success: "the kernel accepts a change"},
			run:     func(*Env) (string, error) { return changeNetwork() },
		},
	}
}

// connectAbstract connects to the sockets in /proc/net/unix whose names begin with @, except that of the roommate.
func connectAbstract(e *Env) (string, error) {
	raw, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return "", err
	}
	var names []string
	for line := range bytes.Lines(raw) {
		if f := strings.Fields(string(line)); len(f) >= 8 && strings.HasPrefix(f[7], "@") && f[7] != "@"+e.Abstract {
			names = append(names, f[7])
		}
	}
	if len(names) == 0 {
		return "", errors.New("there is none")
	}
	return first(names, connectUnix)
}

func connectUnix(name string) (string, error) {
	var refused error
	for _, network := range []string{"unix", "unixpacket", "unixgram"} {
		conn, err := net.DialTimeout(network, name, timeout)
		if err == nil {
			_ = conn.Close()
			return "connected to " + name, nil
		}
		refused = err
	}
	return "", refused
}

func askAbstract(e *Env) (string, error) {
	if e.Abstract == "" {
		return "", suite.Brokenf("there is no roommate")
	}
	conn, err := net.DialTimeout("unix", "@"+e.Abstract, timeout)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(timeout))
	raw, err := io.ReadAll(conn)
	if string(raw) == e.Secret && e.Secret != "" {
		return "the roommate has answered at @" + e.Abstract, nil
	}
	return "", fmt.Errorf("the answer is %q: %w", raw, err)
}

func openPackets() (string, error) {
	const all = 0x0300 // ETH_P_ALL in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return "a packet socket is open", nil
}

func openRaw(family int) (string, error) {
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return fmt.Sprintf("a raw socket of family %d is open", family), nil
}

// changeNetwork makes changes without an effect: it sets the flags of the loopback device as they are.
func changeNetwork() (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return "", suite.Brokenf("naming the device: %w", err)
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, request); err != nil {
		return "", err
	}
	return done(unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request), "the flags of lo are set")
}
