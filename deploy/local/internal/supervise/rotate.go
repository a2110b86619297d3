package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// rotate bounds a log file until ctx ends.
func (s *Supervisor) rotate(ctx context.Context, path string) {
	ticker := time.NewTicker(rotateEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if err := Rotate(path, maxLog); err != nil {
				s.logger.Error("bounding a log file", "error", err)
			}
		}
	}
}

// Rotate moves the content of a log file that has grown over limit to PATH.1 and empties it. The writer keeps the file
// open and appends, so the file is copied and truncated, not renamed; lines written in between are lost.
func Rotate(path string, limit int64) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && info.Size() <= limit) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("rotating a log: %w", err)
	}
	source, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("rotating a log: %w", err)
	}
	defer func() { _ = source.Close() }()
	older, err := os.Create(path + ".1")
	if err != nil {
		return fmt.Errorf("rotating a log: %w", err)
	}
	_, err = io.Copy(older, source)
	if err = errors.Join(err, older.Close()); err != nil {
		return fmt.Errorf("rotating a log: %w", err)
	}
	if err := os.Truncate(path, 0); err != nil {
		return fmt.Errorf("rotating a log: %w", err)
	}
	return nil
}
