package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/supervise"
)

// LoadConfig reads the configuration that Up wrote down.
func LoadConfig(path string) (components.Config, error) {
	var c components.Config
	raw, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("reading the cluster's configuration: %w", err)
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return c, fmt.Errorf("reading the cluster's configuration: %w", err)
	}
	return c, c.Validate()
}

// Supervise is the supervisor: it keeps the components running until ctx ends. environment is what they get, PATH
// included.
func Supervise(ctx context.Context, c components.Config, environment []string, logger *slog.Logger) error {
	release, err := host.Lock(c.SupervisorLock())
	if errors.Is(err, host.ErrLocked) {
		return errors.New("another supervisor runs already")
	}
	if err != nil {
		return err
	}
	defer release()
	cgroups, err := host.FindCgroups()
	if err != nil {
		return err
	}
	if err := cgroups.Enter(components.SystemCgroup); err != nil {
		return err
	}
	// containerd finds its shim, and the shim finds runc, by PATH.
	environment = append(environment, "PATH="+c.ContainerdBin()+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	var programs []supervise.Program
	for _, component := range c.All() {
		programs = append(programs, supervise.Program{
			Name: component.Name, Path: component.Path, Args: append([]string{component.Name}, component.Args...),
			Env: slices.Concat(environment, component.Env), After: component.After, Grace: component.Grace,
			Ready:   func(ctx context.Context) error { return c.Check(ctx, component.Probe) },
			PIDFile: c.PIDFile(component.Name), LogFile: c.LogFile(component.Name),
		})
	}
	supervisor, err := supervise.New(programs, logger)
	if err != nil {
		return err
	}
	self, err := host.Self()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(c.PIDFile(supervisorName)), 0o750); err != nil {
		return fmt.Errorf("making the directory of pid files: %w", err)
	}
	if err := host.WriteRecord(c.PIDFile(supervisorName), host.Record{Process: self, Started: time.Now()}); err != nil {
		return err
	}
	supervisor.Run(ctx)
	return os.Remove(c.PIDFile(supervisorName))
}
