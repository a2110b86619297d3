// Package cluster brings the local cluster up and down and reports its state. It orchestrates: components defines what
// runs, supervise keeps it running, and host and network change the machine.
//
// Up and Down hold one lock for the whole machine, since the cluster's addresses exist once. Both may be called at any
// time, after any crash: they inspect the actual state and do not trust what was recorded.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

// lockFile guards the one cluster that a machine can have.
const lockFile = "/run/fsb-local.lock"

// supervisorName is the supervisor's name among the components.
const supervisorName = "supervisor"

// Options configure Up and Down.
type Options struct {
	Config components.Config
	// Images is the directory of image descriptions; empty for the pause image alone.
	Images string
	// Manifests is a kustomize directory (or a file) to apply; empty for a bare cluster.
	Manifests string
	// Demo runs a first sandbox at the end.
	Demo bool
	// Purge makes Down remove the cache and registry settings too.
	Purge bool
	// Began is the start of the whole set-up, builds included: progress is printed with the time since then. Zero: now.
	Began time.Time
	// Out receives the progress, for people.
	Out io.Writer
}

// progress prints one line per step with the time since the start.
type progress struct {
	began time.Time

	mu  sync.Mutex
	out io.Writer
}

func newProgress(out io.Writer, began time.Time) *progress {
	if began.IsZero() {
		began = time.Now()
	}
	return &progress{began: began, out: out}
}

func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	elapsed := time.Since(p.began)
	_, _ = fmt.Fprintf(p.out, "[%2d:%02d] %s\n", elapsed/time.Minute, elapsed%time.Minute/time.Second, fmt.Sprintf(format, args...))
}

func (p *progress) warn(text string) { p.say("warning: %s", text) }

// lock takes the machine's lock, and refuses a cluster that was brought up with other directories.
func lock(c components.Config) (release func(), err error) {
	release, err = host.Lock(lockFile)
	if errors.Is(err, host.ErrLocked) {
		return nil, errors.New("another fsb-local is bringing the cluster up or down; try again when it is done")
	}
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(lockFile)
	if err != nil {
		release()
		return nil, fmt.Errorf("reading the owner of the cluster: %w", err)
	}
	var owner components.Config
	if json.Unmarshal(raw, &owner) == nil && (owner.RunDir != c.RunDir || owner.DataDir != c.DataDir) &&
		supervisor(owner).Alive() {
		release()
		return nil, fmt.Errorf("this machine already has a cluster, with --run-dir %s --data-dir %s", owner.RunDir, owner.DataDir)
	}
	return release, nil
}

// own records the owner of the cluster in the lock file.
func own(c components.Config) error {
	raw, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encoding the owner of the cluster: %w", err)
	}
	// Not atomically by renaming: the lock is on this very file.
	if err := os.WriteFile(lockFile, raw, 0o600); err != nil {
		return fmt.Errorf("writing the owner of the cluster: %w", err)
	}
	return nil
}

// supervisor returns the recorded process of the cluster's supervisor, which may have exited.
func supervisor(c components.Config) host.Process {
	record, err := host.ReadRecord(c.PIDFile(supervisorName))
	if err != nil {
		return host.Process{}
	}
	return record.Process
}

// client is a Kubernetes client of the administrator's.
func client(c components.Config) (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	config.QPS, config.Burst, config.Timeout = 50, 100, 30*time.Second
	set, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a Kubernetes client: %w", err)
	}
	return set, nil
}

// kubectl runs the built-in kubectl as the administrator.
func kubectl(ctx context.Context, c components.Config, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.Binary())
	cmd.Args = append([]string{"kubectl"}, args...)
	cmd.Env = environment(c)
	var stdout, stderr strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("running kubectl %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// environment returns the environment of programs that run as the administrator: nothing of the caller's, and a home directory
// that `down` removes.
func environment(c components.Config) []string {
	list := []string{"HOME=" + c.RunDir, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, pair := range Environment(c) {
		list = append(list, pair[0]+"="+pair[1])
	}
	return list
}

// Environment returns what a shell must export to use the cluster, in order.
func Environment(c components.Config) [][2]string {
	return [][2]string{
		{"KUBECONFIG", c.Kubeconfig()},
		{"FSB_ADDR", gatewayAddress},
		{"FSB_GATEWAY", gatewayURL},
		{"FSB_ALLOCATOR", allocatorAddress},
		{"FSB_CACERT", filepath.Join(c.ClientDir(), "ca.crt")},
		{"FSB_CERT", filepath.Join(c.ClientDir(), "tls.crt")},
		{"FSB_KEY", filepath.Join(c.ClientDir(), "tls.key")},
		{"FSB_JAEGER_ADDRESS", components.JaegerURL()},
		{"CONTAINERD_ADDRESS", c.ContainerdSocket()},
	}
}
