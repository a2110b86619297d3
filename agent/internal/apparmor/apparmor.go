// Package apparmor has the AppArmor profile of sandboxes, and loads it into the kernel of a host. It decides nothing about sandboxes: a host
// without AppArmor, or one where the profile cannot be loaded, is a Status like any other. All of it may be called concurrently.
//
// The kernel takes policy in a binary form, which only the program apparmor_parser makes. A container of an agent has neither that program nor
// the file system with the kernel's interface. A shim of ours has both: it runs on the host, as containerd does. So it loads the profile when
// it starts, and writes the outcome to a file beside its binary, where its agent reads it.
package apparmor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Host is where a host keeps what concerns AppArmor.
type Host struct {
	// Enabled is the file that has Y if the kernel uses AppArmor.
	Enabled string
	// Kernel is the directory of the kernel's interface.
	Kernel string
	// Policy is the directory of the host's profiles and of the definitions that they include.
	Policy string
	// Parsers are the paths at which apparmor_parser may be; the first that exists counts.
	Parsers []string
}

// Local returns the host as this process sees it.
func Local() Host {
	return Host{
		Enabled: "/sys/module/apparmor/parameters/enabled", Kernel: "/sys/kernel/security/apparmor", Policy: "/etc/apparmor.d",
		Parsers: []string{"/usr/sbin/apparmor_parser", "/sbin/apparmor_parser", "/usr/bin/apparmor_parser", "/usr/local/sbin/apparmor_parser"},
	}
}

// Status is whether sandboxes have the profile.
type Status struct {
	// Profile is its name; empty if it is not loaded.
	Profile string `json:"profile,omitempty"`
	// Off is why it is not loaded, for people; empty if it is.
	Off string `json:"off,omitempty"`
}

func off(format string, args ...any) Status { return Status{Off: fmt.Sprintf(format, args...)} }

// loadTimeout bounds the execution of apparmor_parser.
const loadTimeout = 20 * time.Second

// maxOutput bounds what is kept of the output of apparmor_parser.
const maxOutput = 300

// Load makes sure that the profile is loaded, and enforced, and returns whether it is. It executes apparmor_parser only if it has to. Several
// processes may do it at once: each loads the same.
func (h Host) Load(ctx context.Context) Status {
	if raw, err := os.ReadFile(h.Enabled); err != nil || !bytes.HasPrefix(raw, []byte("Y")) {
		return off("the kernel does not use AppArmor")
	}
	if s, loaded := h.loaded(); loaded || s.Off != "" {
		return s
	}
	parser := h.parser()
	if parser == "" {
		return off("the host has no apparmor_parser to load the profile %s with", Name())
	}
	if err := h.parse(ctx, parser); err != nil {
		return off("loading the profile %s: %v", Name(), err)
	}
	s, loaded := h.loaded()
	if !loaded && s.Off == "" {
		return off("the kernel does not have the profile %s, which apparmor_parser has loaded", Name())
	}
	return s
}

// loaded looks for the profile in the kernel's list. A profile that is not enforced is a reason not to use it.
func (h Host) loaded() (Status, bool) {
	raw, err := os.ReadFile(filepath.Join(h.Kernel, "profiles"))
	if err != nil {
		return off("reading the profiles of the kernel: %v", err), false
	}
	for line := range strings.Lines(string(raw)) { // NAME (MODE)
		name, mode, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != Name() {
			continue
		}
		if mode != "(enforce)" && mode != "(kill)" {
			return off("the profile %s is loaded, but in the mode %s", name, mode), false
		}
		return Status{Profile: name}, true
	}
	return Status{}, false
}

func (h Host) parser() string {
	for _, path := range h.Parsers {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

// parse has apparmor_parser load the profile, from its standard input and past its cache.
func (h Host) parse(ctx context.Context, parser string) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	_, err := os.Stat(filepath.Join(h.Policy, "abi/3.0"))
	cmd := exec.CommandContext(ctx, parser, "--replace", "--skip-cache")
	cmd.Stdin, cmd.Env = strings.NewReader(Text(err == nil)), []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.WaitDelay = time.Second
	var out bounded
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", parser, err, strings.Join(strings.Fields(string(out.kept)), " "))
	}
	return nil
}

// bounded keeps the first maxOutput bytes that are written to it.
type bounded struct{ kept []byte }

// Write implements io.Writer. It never fails, so that the program that writes is not killed for it.
func (b *bounded) Write(p []byte) (int, error) {
	b.kept = append(b.kept, p[:min(len(p), maxOutput-len(b.kept))]...)
	return len(p), nil
}

// statusFile is the file, in the directory of a shim's binary, with the status that the shim has found last.
const statusFile = "apparmor.json"

// Write keeps a status in a directory. A status that is there already is not written.
func Write(dir string, s Status) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encoding the status of AppArmor: %w", err)
	}
	path := filepath.Join(dir, statusFile)
	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, raw) {
		return nil
	}
	tmp, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return fmt.Errorf("writing the status of AppArmor: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.Write(raw)
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("writing the status of AppArmor: %w", err)
	}
	return nil
}

// Read returns the status that Write has kept in a directory.
func Read(dir string) Status {
	raw, err := os.ReadFile(filepath.Join(dir, statusFile))
	if errors.Is(err, fs.ErrNotExist) {
		return off("the shim has not reported whether the host has AppArmor")
	}
	var s Status
	if err == nil {
		err = json.Unmarshal(raw, &s)
	}
	switch {
	case err != nil:
		return off("reading what the shim has reported: %v", err)
	case s.Profile == "" && s.Off == "", s.Profile != "" && s.Profile != Name():
		return off("the shim has reported the profile %q, want %s", s.Profile, Name())
	}
	return s
}
