package components

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"text/template"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

// PauseImage holds the namespaces of every Pod.
const PauseImage = "docker.io/fast-sandbox/pause:dev"

func containerd(c Config) Component {
	return Component{
		Name: Containerd, Path: filepath.Join(c.ContainerdBin(), "containerd"), Grace: 5 * time.Second,
		Probe: Probe{Socket: c.ContainerdSocket()},
		Args:  []string{"--config", c.conf("containerd.toml")},
		// containerd adds its spans to the traces of its callers, and starts none of its own: the kubelet polls it all the time.
		Env: []string{
			"OTEL_EXPORTER_OTLP_ENDPOINT=" + OTLPEndpoint(), "OTEL_SERVICE_NAME=" + Containerd,
			"OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0", "OTEL_BSP_SCHEDULE_DELAY=1000",
		},
	}
}

// containerdConfig keeps every path of containerd's own, so that another containerd on the machine is left alone.
var containerdConfig = template.Must(template.New("containerd.toml").Parse(`version = 4
root = '{{.ContainerdRoot}}'
state = '{{.ContainerdState}}'
imports = []
disabled_plugins = [
  'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.erofs',
  'io.containerd.differ.v1.erofs',
]

[plugins.'io.containerd.server.v1.grpc']
  address = '{{.ContainerdSocket}}'

[plugins.'io.containerd.server.v1.ttrpc']
  address = '{{.ContainerdSocket}}.ttrpc'

[plugins.'io.containerd.shim.v1.manager']
  socket_dir = '{{.ShimSockets}}'

[plugins.'io.containerd.internal.v1.opt']
  path = '{{.ContainerdRoot}}/opt'

[plugins.'io.containerd.nri.v1.nri']
  disable = true

[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'

  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{{.Pause}}'

  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = '{{.DataDir}}/certs.d'

[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE runc may not lower oom_score_adj, and every Pod would fail.
  restrict_oom_score_adj = {{.NoSysResource}}
  netns_mounts_under_state_dir = true

  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'

    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false

  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{{.CNIDir}}']
    conf_dir = '{{.DataDir}}/cni'
`))

func (c Config) containerdFiles() ([]File, error) {
	var text strings.Builder
	err := containerdConfig.Execute(&text, struct {
		Config
		Pause string
	}{c, PauseImage})
	if err != nil {
		return nil, fmt.Errorf("rendering the configuration of containerd: %w", err)
	}
	// Point-to-point links instead of a bridge: every packet is routed, so Services work between Pods of this one node
	// without br_netfilter, and there is no bridge to leave behind.
	cni, err := json.MarshalIndent(map[string]any{
		"cniVersion": "1.0.0",
		"name":       NodeName,
		"plugins": []any{
			map[string]any{"type": "ptp", "ipMasq": false, "ipam": map[string]any{
				"type": "host-local", "dataDir": c.run("cni"),
				"ranges": []any{[]any{map[string]any{"subnet": network.PodCIDR}}},
				"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
			}},
			map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}, "snat": true},
		},
	}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("rendering the configuration of CNI: %w", err)
	}
	return []File{
		{Path: c.conf("containerd.toml"), Content: []byte(text.String())},
		{Path: c.data("cni", "10-fsb-local.conflist"), Content: cni},
	}, nil
}
