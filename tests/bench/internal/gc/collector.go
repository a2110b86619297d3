package gc

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/process"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

const (
	startTime = 2 * time.Minute
	// lifted is a number of requests per second that no collector reaches here.
	lifted = "100000"
)

// The candidates' keys.
const (
	Ours    = "ours"
	Default = "default"
	Lifted  = "lifted"
)

// candidate is a collector.
type candidate struct {
	// key is a part of the names of values; title says what it is, and how it differs from the defaults.
	key, title string
	// limit bounds how long it is watched at the tree; 0 is to the end.
	limit   time.Duration
	program string
	flags   func(w *testbed, port string) []string
}

func candidates(o Options) []candidate {
	builtin := func(w *testbed, port string, more ...string) []string {
		return append([]string{"--kubeconfig", w.api.Kubeconfig, "--leader-elect=false", "--controllers=garbage-collector-controller,pod-garbage-collector-controller",
			"--bind-address=127.0.0.1", "--secure-port", port, "--authentication-skip-lookup", "--authorization-always-allow-paths=/debug/pprof/*"}, more...)
	}
	program := filepath.Join("k8s", controllerManager)
	return []candidate{
		{key: Ours, title: "services/gc, its defaults but for --mode=enforce --max-delete-share=1 --leader-elect=false --profiling", program: "gc",
			flags: func(w *testbed, port string) []string {
				tls := w.api.TLS(rpc.RoleGC)
				return []string{"--kubeconfig", w.api.Kubeconfig, "--mode=enforce", "--max-delete-share=1", "--leader-elect=false", "--namespace", "default",
					"--bind-address=127.0.0.1:0", "--health-socket=0", "--metrics-bind-address", "127.0.0.1:" + port, "--profiling",
					"--tls-cert-file", tls.CertFile, "--tls-key-file", tls.KeyFile, "--tls-ca-file", tls.CAFile}
			}},
		{key: Default, title: "kube-controller-manager, its two garbage collectors alone, default limits", program: program, limit: o.DefaultFor,
			flags: func(w *testbed, port string) []string { return builtin(w, port) }},
		{key: Lifted, title: "the same with --kube-api-qps=" + lifted + " --kube-api-burst=" + lifted, program: program,
			flags: func(w *testbed, port string) []string {
				return builtin(w, port, "--kube-api-qps="+lifted, "--kube-api-burst="+lifted)
			}},
	}
}

// collector is a running candidate.
type collector struct {
	*process.Process
	candidate

	heap   string // URL of its heap profile
	client *http.Client
}

// start starts a candidate. The caller must kill it.
func (w *testbed) start(c candidate, round int) (*collector, error) {
	address, err := process.FreeAddress("127.0.0.1")
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("finding a free port: %w", err)
	}
	p, err := process.Start(process.Config{
		Name: fmt.Sprintf("%s-%d", c.key, round), Dir: w.dir, Path: filepath.Join(w.bin, c.program), Args: c.flags(w, port), Env: []string{"PATH=/usr/bin:/bin"},
	})
	if err != nil {
		return nil, err
	}
	client, err := w.profiler(c)
	return &collector{Process: p, candidate: c, heap: "https://" + address + "/debug/pprof/heap?gc=1&debug=1", client: client}, err
}

// profiler returns a client that reads profiles of a candidate.
func (w *testbed) profiler(c candidate) (*http.Client, error) {
	secure := &tls.Config{InsecureSkipVerify: true} // a certificate that it made itself, on this machine
	if c.key == Ours {
		var err error
		if secure, err = w.api.TLS(rpc.RoleMetrics).ClientConfig(rpc.RoleGC.ServerName()); err != nil {
			return nil, err
		}
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: secure}}, nil
}

// collects waits until a collector deletes an object whose owner does not exist.
func (w *testbed) collects(ctx context.Context, p *collector) error {
	maps := w.kube.CoreV1().ConfigMaps("default")
	canary, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "canary-",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "no-such-owner", UID: uuid.NewUUID()}}}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating a canary: %w", err)
	}
	return mesh.Poll(ctx, 100*time.Millisecond, startTime, func(ctx context.Context) error {
		if err := p.Alive(); err != nil {
			return err
		}
		_, err := maps.Get(ctx, canary.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return fmt.Errorf("reading the canary: %w", err)
		}
		return fmt.Errorf("%s has not deleted the canary", p.key)
	})
}

// memory lets the collector become idle and collect its own heap, and then reads its memory.
func (p *collector) memory(ctx context.Context) (m Memory, err error) {
	if err := wait.For(ctx, settleTime/2); err != nil {
		return m, err
	}
	if m.Heap, err = p.live(ctx); err != nil {
		return m, err
	}
	if err := wait.For(ctx, settleTime/2); err != nil { // memory is returned to the kernel gradually
		return m, err
	}
	usage, err := p.Usage()
	if err != nil {
		return m, err
	}
	m.RSS = usage.RSSBytes
	m.PSS, err = host.PSS(p.PID())
	return m, err
}

// live is the heap that is in use after a garbage collection.
func (p *collector) live(ctx context.Context) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.heap, nil)
	if err != nil {
		return 0, fmt.Errorf("asking %s for its heap: %w", p.key, err)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("asking %s for its heap: %w", p.key, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("asking %s for its heap: %s", p.key, resp.Status)
	}
	return ParseHeap(resp.Body)
}

// ParseHeap reads the bytes that are allocated out of a heap profile with debug=1.
func ParseHeap(profile io.Reader) (int64, error) {
	lines := bufio.NewScanner(profile)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "# HeapAlloc = "); ok {
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("reading a heap's size: %w", err)
			}
			return n, nil
		}
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("reading a heap's size: %w", err)
	}
	return 0, fmt.Errorf("reading a heap's size: %w", io.ErrUnexpectedEOF)
}
