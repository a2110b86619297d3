package attack

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// device is a device of the node.
type device struct {
	name         string
	mode         uint32
	major, minor uint32
}

func (d device) String() string { return d.name }

func devices() []Attack {
	device := func(name, does string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "devices: " + name, Does: does, Success: "the device can be opened"}, run: run}
	}
	return []Attack{
		device("disks", "makes nodes of the node's disks and reads them", func(*Env) (string, error) {
			disks, err := disks()
			if err != nil {
				return "", err
			}
			return first(disks, openNew)
		}),
		device("memory, kernel log and control devices", "makes nodes of /dev/mem, /dev/kmsg, the loop, device mapper, FUSE and KVM devices, and opens them", func(*Env) (string, error) {
			return first(controls(), openNew)
		}),
		{
			Attempt: suite.Attempt{Name: "devices: those in /dev", Does: "looks for devices in /dev that a sandbox needs not have", Success: "another one than null, zero, full, random, urandom, tty and terminals"},
			run:     func(*Env) (string, error) { return foreignDevices() },
		},
		{
			Attempt: suite.Attempt{Name: "devices: terminal of another", Does: "opens the console and the terminals of the node, and pushes input into them", Success: "a character is pushed"},
			run: func(*Env) (string, error) {
				return first([]string{"/dev/console", "/dev/tty", "/dev/pts/0"}, pushInput)
			},
			Unprovable: "newer kernels have no TIOCSTI",
		},
	}
}

// disks returns the block devices that /sys or /proc name.
func disks() ([]device, error) {
	var out []device
	files, _ := filepath.Glob("/sys/class/block/*/dev")
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		if d, ok := parseDevice(filepath.Base(filepath.Dir(f)), strings.TrimSpace(string(raw)), ":"); ok {
			out = append(out, d)
		}
	}
	raw, _ := os.ReadFile("/proc/partitions")
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) == 4 {
			if d, ok := parseDevice(f[3], f[0]+":"+f[1], ":"); ok {
				out = append(out, d)
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no disk can be seen")
	}
	return out, nil
}

func parseDevice(name, number, separator string) (device, bool) {
	a, b, _ := strings.Cut(number, separator)
	major, err1 := strconv.ParseUint(a, 10, 32)
	minor, err2 := strconv.ParseUint(b, 10, 32)
	return device{name, unix.S_IFBLK, uint32(major), uint32(minor)}, err1 == nil && err2 == nil
}

func controls() []device {
	return []device{
		{"mem", unix.S_IFCHR, 1, 1}, {"port", unix.S_IFCHR, 1, 4}, {"kmsg", unix.S_IFCHR, 1, 11}, {"loop-control", unix.S_IFCHR, 10, 237},
		{"device-mapper", unix.S_IFCHR, 10, 236}, {"fuse", unix.S_IFCHR, 10, 229}, {"kvm", unix.S_IFCHR, 10, 232}, {"vhost-net", unix.S_IFCHR, 10, 238},
		{"autofs", unix.S_IFCHR, 10, 235}, {"uinput", unix.S_IFCHR, 10, 223}, {"rtc", unix.S_IFCHR, 10, 135}, {"nvram", unix.S_IFCHR, 10, 144},
	}
}

// openNew makes a node of a device and opens it.
func openNew(d device) (string, error) {
	dir, err := os.MkdirTemp("", "device-")
	if err != nil {
		return "", suite.Brokenf("making a directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "node")
	if err := unix.Mknod(path, d.mode|0o600, int(unix.Mkdev(d.major, d.minor))); err != nil {
		return "", fmt.Errorf("making the node: %w", err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("opening it: %w", err)
	}
	_ = unix.Close(fd)
	return fmt.Sprintf("the device %s (%d:%d) is open", d.name, d.major, d.minor), nil
}

func foreignDevices() (string, error) {
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		switch e.Name() {
		case "null", "zero", "full", "random", "urandom", "tty", "console", "ptmx":
			continue
		}
		if e.Type()&os.ModeDevice != 0 {
			return "/dev/" + e.Name() + " is there", nil
		}
	}
	return "", fmt.Errorf("none of %d entries is another device", len(entries))
}

// pushInput pushes a space, which harms no shell, into a terminal.
func pushInput(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	return done(unix.IoctlSetPointerInt(fd, unix.TIOCSTI, ' '), "input is pushed into %s", path)
}
