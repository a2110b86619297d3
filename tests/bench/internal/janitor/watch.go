package janitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	// userName is who the janitor is to the API server.
	userName = "bench-janitor"
	// warmups are scans that do not count.
	warmups = 5
	// readyTime is how long a janitor may take until it has judged everything, and stopTime to end.
	readyTime = 90 * time.Second
	stopTime  = 30 * time.Second
	// never is an interval of scans longer than any run.
	never = 24 * time.Hour
)

// Metrics of the janitor.
const (
	scanCount = "fastsandbox_janitor_scan_seconds_count"
	scanSum   = "fastsandbox_janitor_scan_seconds_sum"
	verdicts  = "fastsandbox_janitor_verdicts"
	// healthy is the verdict on a container that its Sandbox is assigned to, of an agent that exists.
	healthy = verdicts + `{action="keep",reason="assigned"}`
	// handled is containerd's count of calls that it has answered.
	handled = "grpc_server_handled_total"
)

// keeper is a running janitor.
type keeper struct {
	*process.Process

	metrics string
	client  *http.Client // of metrics
}

// keep starts a janitor with all that it has in a cluster, but for how often it scans.
func (w *testbed) keep(interval time.Duration) (*keeper, error) {
	metrics, err := process.FreeAddress("127.0.0.1")
	if err != nil {
		return nil, err
	}
	w.keepers++
	tls := w.api.TLS(rpc.RoleJanitor)
	p, err := process.Start(process.Config{
		Name: fmt.Sprint("janitor-", w.keepers), Dir: w.workspace.dir, Path: filepath.Join(w.bin, "janitor"), Env: []string{"PATH=/usr/bin:/bin"},
		Args: []string{
			"--node-name", nodeName, "--kubeconfig", w.kubeconfig, "--bind-address", "127.0.0.1:0", "--metrics-bind-address", metrics,
			"--health-socket", "0", "--tls-cert-file", tls.CertFile, "--tls-key-file", tls.KeyFile, "--tls-ca-file", tls.CAFile,
			"--containerd-socket", w.node.socket, "--containerd-state", w.node.path("s"), "--log-root", w.node.path("log"), "--fifo-root", w.node.path("fifo"),
			"--cgroup-parents", w.workspace.cgroup, "--scan-interval", interval.String(),
		},
	})
	if err != nil {
		return nil, err
	}
	secure, err := w.api.TLS(rpc.RoleMetrics).ClientConfig(rpc.RoleJanitor.ServerName())
	return &keeper{p, metrics, &http.Client{Transport: &http.Transport{TLSClientConfig: secure}}}, err
}

// readings are the values of metrics by their names with labels.
type readings map[string]float64

// read asks the janitor for its metrics.
func (k *keeper) read(ctx context.Context) (readings, error) {
	if err := k.Alive(); err != nil {
		return nil, err
	}
	return scrape(ctx, k.client, "https://"+k.metrics+"/metrics")
}

// scrape reads metrics.
func scrape(ctx context.Context, client *http.Client, url string) (readings, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("reading metrics: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("reading metrics: %s", resp.Status)
	}
	return parseMetrics(string(raw))
}

// parseMetrics reads Prometheus's text format, as far as its samples have no time.
func parseMetrics(text string) (readings, error) {
	out := readings{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		if i < 0 {
			return nil, fmt.Errorf("reading metrics: %q has no value", line)
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("reading metrics: %w", err)
		}
		out[line[:i]] = value
	}
	return out, nil
}

// sum adds up a metric over its labels.
func (r readings) sum(name string) float64 {
	sum := 0.0
	for key, value := range r {
		if key == name || strings.HasPrefix(key, name+"{") {
			sum += value
		}
	}
	return sum
}

// judged returns nil once the janitor judges exactly that many objects, each a healthy container.
func (r readings) judged(want int) error {
	if got, all := r[healthy], r.sum(verdicts); int(got) != want || int(all) != want {
		return fmt.Errorf("the janitor judges %.0f things, of which %.0f are healthy containers, want %d of each", all, got, want)
	}
	return nil
}

// counters are the values of all counters at one time.
type counters struct {
	at                         time.Time
	janitor, containerd, shims float64 // CPU seconds
	metrics, calls             readings
}

// count reads the counters. Calls are read at the outer side of a window, so that reading them is no part of it.
func (w *testbed) count(ctx context.Context, k *keeper, shims []int, end bool) (c counters, err error) {
	calls := func() error {
		c.calls, err = scrape(ctx, http.DefaultClient, "http://"+w.node.metrics+"/v1/metrics")
		return err
	}
	if !end && calls() != nil {
		return c, err
	}
	if c.metrics, err = k.read(ctx); err != nil {
		return c, err
	}
	c.at = time.Now()
	if c.janitor, err = cpuOf(k.PID()); err != nil {
		return c, err
	}
	if c.containerd, err = cpuOf(w.node.PID()); err != nil {
		return c, err
	}
	if c.shims, err = cpuOf(shims...); err == nil && end {
		err = calls()
	}
	return c, err
}

// watch measures a janitor tick by tick for a number of scans, or, if it must not scan at all, for a number of ticks.
// A tick begins in the middle between two scans, so that none is cut in two.
func (w *testbed) watch(ctx context.Context, k *keeper, scans, ticks int) (*Window, error) {
	shims := w.node.shims()
	if scans > 0 {
		took, err := w.awaitScan(ctx, k)
		if err != nil {
			return nil, err
		}
		if err := wait.For(ctx, max(0, w.Interval-took)/2); err != nil {
			return nil, err
		}
	}
	first, err := w.count(ctx, k, shims, false)
	if err != nil {
		return nil, err
	}
	win := &Window{Began: first.at, Shims: len(shims)}
	ticker := time.NewTicker(w.Interval)
	defer ticker.Stop()
	last := first.metrics
	for tick := 0; tick < ticks || last[scanCount] < first.metrics[scanCount]+float64(scans); tick++ {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		now, err := k.read(ctx)
		if err != nil {
			return nil, err
		}
		if now[scanCount]-last[scanCount] == 1 { // of two in one tick, neither's time is known
			win.Scans = append(win.Scans, Call{At: time.Now(), Wall: 1000 * (now[scanSum] - last[scanSum])})
		}
		last = now
		used, err := k.Usage()
		if err != nil {
			return nil, err
		}
		win.RSS = max(win.RSS, float64(used.RSSBytes)/(1<<20))
	}
	end, err := w.count(ctx, k, shims, true)
	if err != nil {
		return nil, err
	}
	win.end(first, end)
	return win, nil
}

// end fills in what has happened between the two.
func (w *Window) end(first, end counters) {
	w.Seconds = end.at.Sub(first.at).Seconds()
	w.Count = int(end.metrics[scanCount] - first.metrics[scanCount])
	w.CPU = CPU{end.janitor - first.janitor, end.containerd - first.containerd, end.shims - first.shims}
	w.Calls = map[string]int{}
	for key, value := range end.calls {
		if n := int(value - first.calls[key]); n > 0 && strings.HasPrefix(key, handled+"{") {
			w.Calls[label(key, "grpc_method")+" "+label(key, "grpc_service")] += n
		}
	}
}

// label is the value of a label in a metric's name; label values with quotes in them are none of ours.
func label(key, name string) string {
	_, rest, _ := strings.Cut(key, name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// awaitScan waits for the end of a scan, and returns how long it took.
func (w *testbed) awaitScan(ctx context.Context, k *keeper) (time.Duration, error) {
	first, err := k.read(ctx)
	if err != nil {
		return 0, err
	}
	var took time.Duration
	err = mesh.Poll(ctx, w.Interval/20, readyTime, func(ctx context.Context) error {
		now, err := k.read(ctx)
		if err == nil && now[scanCount] == first[scanCount] {
			err = errors.New("the janitor has not scanned again")
		}
		took = time.Duration((now[scanSum] - first[scanSum]) * float64(time.Second))
		return err
	})
	return took, err
}

// request is one line of the API server's audit log, as far as it matters.
type request struct {
	ID       string    `json:"auditID"`
	Verb     string    `json:"verb"`
	Received time.Time `json:"requestReceivedTimestamp"`
	User     struct {
		Username string `json:"username"`
	} `json:"user"`
}

// parseRequests reads the janitor's requests, each once, in the API server's audit log.
func parseRequests(raw []byte) ([]request, error) {
	var out []request
	seen := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		var r request
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			return nil, fmt.Errorf("reading the audit log: %w", err)
		}
		if r.User.Username == userName && !seen[r.ID] {
			seen[r.ID] = true
			out = append(out, r)
		}
	}
	return out, nil
}
