package ctrd

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

const (
	// minTrim is less than twice any limit of a log.
	minTrim = 64 << 10
)

// TrimLogs bounds the logs below a root whose agents do not: an agent that is restarting, or whose Pod is gone. A log that takes
// more than twice the limit that its agent has noted beside it is trimmed to that limit. It returns the ids of their containers;
// the error joins what could not be done.
func TrimLogs(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var trimmed []string
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || !ours(e.Name()) {
			continue
		}
		done, err := trimTwice(filepath.Join(root, e.Name()))
		if done {
			trimmed = append(trimmed, e.Name())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it was removed
			errs = append(errs, err)
		}
	}
	return trimmed, errors.Join(errs...)
}

// trimTwice trims the log in a directory if it takes more than twice its limit. A log without one is an earlier version's.
func trimTwice(dir string) (bool, error) {
	path := filepath.Join(dir, OutputFile)
	info, err := os.Lstat(path)
	if err != nil {
		return false, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || st.Blocks*512 <= minTrim {
		return false, nil
	}
	raw, err := os.ReadFile(filepath.Join(dir, node.LimitFile))
	if err != nil {
		return false, err
	}
	limit, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil || limit <= 0 || st.Blocks*512 <= 2*limit {
		return false, nil // torn by a crash of the node
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = node.TrimLog(f, info.Size(), limit)
	return err == nil, err
}
