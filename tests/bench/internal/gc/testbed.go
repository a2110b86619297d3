package gc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/apiserver"
)

// controllerManager is the program that has the built-in collectors.
const controllerManager = "kube-controller-manager"

// testbed is the environment of the collectors.
type testbed struct {
	Options
	bin, dir string
	api      *apiserver.Server
	kube     kubernetes.Interface
	meta     metadata.Interface
}

// newTestbed starts an API server with etcd. The testbed must be closed even after an error.
func newTestbed(o Options, bin, dir string) (*testbed, error) {
	w := &testbed{Options: o, bin: bin, dir: dir}
	for _, program := range []string{"gc", filepath.Join("k8s", controllerManager)} { // before minutes of measuring
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			return w, fmt.Errorf("finding a collector (make bench-gc builds it): %w", err)
		}
	}
	w.Say("starting an API server")
	var err error
	if w.api, err = apiserver.Start(apiserver.Options{Bin: bin, Dir: dir, Roles: []rpc.Role{rpc.RoleGC, rpc.RoleMetrics}}); err != nil {
		return w, err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", w.api.Kubeconfig)
	if err != nil {
		return w, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = -1, -1
	if w.meta, err = metadata.NewForConfig(cfg); err != nil {
		return w, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	cfg.ContentType = runtime.ContentTypeProtobuf
	if w.kube, err = kubernetes.NewForConfig(cfg); err != nil {
		return w, fmt.Errorf("connecting to Kubernetes: %w", err)
	}
	return w, nil
}

func (w *testbed) close() error {
	if w.api == nil {
		return nil
	}
	return w.api.Stop()
}

// requests reads how many requests for single ConfigMaps the API server has answered, by verb.
func (w *testbed) requests(ctx context.Context) (map[string]float64, error) {
	raw, err := w.kube.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	return ParseRequests(string(raw))
}

// ParseRequests reads requests for single ConfigMaps by verb out of an API server's metrics.
func ParseRequests(text string) (map[string]float64, error) {
	label := regexp.MustCompile(`(\w+)="([^"]*)"`)
	out := map[string]float64{}
	for line := range strings.Lines(text) {
		labels, ok := strings.CutPrefix(line, "apiserver_request_total{")
		if !ok {
			continue
		}
		labels, value, ok := strings.Cut(strings.TrimSpace(labels), "} ")
		if !ok {
			return nil, errors.New("reading the API server's metrics: a line without a value: " + line)
		}
		has := map[string]string{}
		for _, m := range label.FindAllStringSubmatch(labels, -1) {
			has[m[1]] = m[2]
		}
		switch has["verb"] {
		case "GET", "POST", "PUT", "PATCH", "DELETE":
		default:
			continue // lists, watches, collections
		}
		if has["resource"] != "configmaps" {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("reading the API server's metrics: %w", err)
		}
		out[has["verb"]] += n
	}
	return out, nil
}
