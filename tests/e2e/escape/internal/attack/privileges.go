package attack

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// The copies of the program in its image that would give it privileges.
const (
	// SetUID belongs to root and has the set-user-ID bit.
	SetUID = "/setuid"
	// FileCapabilities has CAP_SYS_ADMIN as a capability of the file.
	FileCapabilities = "/filecaps"
	// PrivilegesArg makes it print its effective user and capabilities.
	PrivilegesArg = "privileges"
)

// allowedCapabilities are those that root in a sandbox may have, by their numbers: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
// SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, SETFCAP.
func allowedCapabilities() uint64 {
	mask := uint64(0)
	for _, bit := range []int{0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31} {
		mask |= 1 << bit
	}
	return mask
}

func privileges() []Attack {
	privilege := func(name, does, success string, run func(*Env) (string, error)) Attack {
		return Attack{Attempt: suite.Attempt{Name: "privileges: " + name, Does: does, Success: success}, run: run}
	}
	by := func(u User, a Attack) Attack { a.By = u; return a }
	return []Attack{
		privilege("capabilities", "looks at the capabilities that it has and can ever get", "one is beyond those of a sandbox; for an ordinary user: any", func(*Env) (string, error) { return capabilities() }),
		privilege("raise a capability", "adds every capability to its ambient set", "one beyond those of a sandbox is added", func(*Env) (string, error) { return raise() }),
		privilege("no_new_privs", "looks for the flag", "it is not set", func(*Env) (string, error) { return missing("NoNewPrivs", "1") }),
		privilege("seccomp", "looks for the filter", "there is none", func(*Env) (string, error) { return missing("Seccomp", "2") }),
		by(Mere, privilege("setuid program", "executes a program of its image that belongs to root and has the set-user-ID bit", "the program is root", func(*Env) (string, error) {
			return gain(SetUID, func(uid int, _ uint64) bool { return uid == 0 })
		})),
		privilege("capabilities of a file", "executes a program of its image that has CAP_SYS_ADMIN as a capability of the file", "the program has it", func(*Env) (string, error) {
			return gain(FileCapabilities, func(_ int, caps uint64) bool { return caps&^allowedCapabilities() != 0 })
		}),
		by(Mere, Attack{Attempt: suite.Attempt{Name: "privileges: become root", Does: "sets its user id to 0", Success: "its effective user id is 0"},
			Unprovable: "no ordinary user may, also in an open container",
			run: func(*Env) (string, error) {
				if err := unix.Setresuid(0, 0, 0); err != nil {
					return "", err
				}
				return fmt.Sprintf("the user id is %d", unix.Geteuid()), nil
			}}),
	}
}

// status returns a field of /proc/self/status.
func status(key string) (string, error) {
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", suite.Brokenf("reading the status: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		if k, value, _ := strings.Cut(line, ":"); k == key {
			return strings.TrimSpace(value), nil
		}
	}
	return "", suite.Brokenf("the status has no %s", key)
}

func mask(key string) (uint64, error) {
	text, err := status(key)
	if err != nil {
		return 0, err
	}
	value, err := strconv.ParseUint(text, 16, 64)
	if err != nil {
		return 0, suite.Brokenf("reading %s: %w", key, err)
	}
	return value, nil
}

func capabilities() (string, error) {
	allowed := map[string]uint64{"CapBnd": allowedCapabilities(), "CapPrm": allowedCapabilities(), "CapEff": allowedCapabilities(), "CapInh": 0, "CapAmb": 0}
	if unix.Geteuid() != 0 {
		allowed["CapPrm"], allowed["CapEff"] = 0, 0
	}
	for key, can := range allowed {
		has, err := mask(key)
		if err != nil {
			return "", err
		}
		if more := has &^ can; more != 0 {
			return fmt.Sprintf("%s has capability %d", key, bits.TrailingZeros64(more)), nil
		}
	}
	return "", errors.New("there are only those of a sandbox")
}

func raise() (string, error) {
	runtime.LockOSThread() // capabilities are those of a thread
	defer runtime.UnlockOSThread()
	var refused error
	for bit := range 64 {
		if allowedCapabilities()&(1<<bit) != 0 {
			continue
		}
		// It has to be inheritable first.
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			return "", suite.Brokenf("reading the capabilities: %w", err)
		}
		data[bit/32].Inheritable |= 1 << (bit % 32)
		data[bit/32].Permitted |= 1 << (bit % 32)
		data[bit/32].Effective |= 1 << (bit % 32)
		if err := unix.Capset(&header, &data[0]); err != nil {
			refused = err
			continue
		}
		if refused = unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(bit), 0, 0); refused == nil {
			return fmt.Sprintf("capability %d is in the ambient set", bit), nil
		}
	}
	return "", refused
}

func missing(key, want string) (string, error) {
	has, err := status(key)
	if err != nil {
		return "", err
	}
	if has != want {
		return key + " is " + has, nil
	}
	return "", fmt.Errorf("%s is %s", key, want)
}

// gain executes a copy of the program and looks at the privileges that it has.
func gain(path string, gained func(uid int, caps uint64) bool) (string, error) {
	if _, err := os.Stat(path); err != nil {
		return "", suite.Brokenf("the image lacks a file: %w", err)
	}
	out, err := exec.Command(path, PrivilegesArg).Output()
	if err != nil {
		return "", err
	}
	uid, caps := 0, uint64(0)
	if _, err := fmt.Sscanf(string(out), "%d %x", &uid, &caps); err != nil {
		return "", suite.Brokenf("reading %q: %w", out, err)
	}
	if gained(uid, caps) {
		return fmt.Sprintf("%s has run as user %d with the capabilities %x", path, uid, caps), nil
	}
	return "", fmt.Errorf("%s has run as user %d with the capabilities %x", path, uid, caps)
}

// Privileges returns what a program that gain executes prints.
func Privileges() string {
	caps, _ := mask("CapEff")
	return fmt.Sprintf("%d %x", unix.Geteuid(), caps)
}
