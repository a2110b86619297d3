package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// Record is the content of a pid file: which process, and its history under the supervisor.
type Record struct {
	Process
	// Started is when this process began.
	Started time.Time `json:"started"`
	// Restarts counts how often its component was started again.
	Restarts int `json:"restarts"`
	// LastExit says how the process before it ended; empty for the first.
	LastExit string `json:"lastExit,omitempty"`
}

// WriteRecord replaces a pid file.
func WriteRecord(path string, record Record) error {
	raw, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("encoding pid file: %w", err)
	}
	_, err = WriteFile(path, append(raw, '\n'), 0o644)
	return err
}

// ReadRecord reads a pid file. One that is missing or was cut short by a crash gives the zero Record, whose Process is
// not Alive: a pid file only ever points to a process, it never proves one.
func ReadRecord(path string) (Record, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, nil
	}
	if err != nil {
		return Record{}, fmt.Errorf("reading pid file: %w", err)
	}
	var record Record
	if err := json.Unmarshal(raw, &record); err != nil {
		return Record{}, nil //nolint:nilerr // a torn pid file points to no process, as a missing one
	}
	return record, nil
}
