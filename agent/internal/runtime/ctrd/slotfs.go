package ctrd

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// What a slot has in its root, which all slots of one version of sandbox-init share and none can write to.
const (
	initPath   = "/sandbox-init"
	privateDir = "/fsb"     // the slot's own directory, with its socket
	filesDir   = "/fsb-etc" // what the claim puts into /etc
	newRootDir = "/new"     // where the claim builds the new root
)

// slotFile is where a slot keeps a file that the claim puts at destination.
func slotFile(destination string) string { return path.Join(filesDir, path.Base(destination)) }

// slotRootfs makes the root of slots on the host, once for each version of sandbox-init: other agents of the node, of
// this version or another, make and use theirs beside it.
func (r *Runtime) slotRootfs() (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slotsRoot != "" {
		return r.slotsRoot, nil
	}
	binary, err := os.ReadFile(r.config.SandboxInit)
	if err != nil {
		return "", fmt.Errorf("reading sandbox-init: %w", err)
	}
	sum := sha256.Sum256(binary)
	dir := filepath.Join(r.config.SlotRoot, hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(dir); err == nil {
		r.slotsRoot = dir
		return dir, nil
	}
	if err := os.MkdirAll(r.config.SlotRoot, 0o755); err != nil { //nolint:gosec // a slot of any user looks into it
		return "", fmt.Errorf("making the root of slots: %w", err)
	}
	tmp, err := os.MkdirTemp(r.config.SlotRoot, ".new-")
	if err != nil {
		return "", fmt.Errorf("making the root of slots: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := fillRootfs(tmp, binary); err != nil {
		return "", fmt.Errorf("making the root of slots: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("making the root of slots: %w", err)
	}
	r.slotsRoot = dir
	return dir, nil
}

func fillRootfs(dir string, binary []byte) error {
	for _, d := range []string{"proc", "dev", "sys", privateDir, filesDir, newRootDir} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil { //nolint:gosec // as any root directory
			return err
		}
	}
	for _, f := range []string{"hosts", "hostname", "resolv.conf"} {
		if err := os.WriteFile(filepath.Join(dir, filesDir, f), nil, 0o644); err != nil { //nolint:gosec // mount points
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, initPath), binary, 0o755); err != nil { //nolint:gosec // it is executed
		return err
	}
	return os.Chmod(dir, 0o755) //nolint:gosec // as any root directory
}
