// Package refusal records what was refused of agents, and of Pods that only look like agents: it counts, logs and raises Events on
// their Pods. Nothing of the kind happens unless an agent is broken or hostile, so that Events are limited to one for each Pod in
// a while. It decides nothing. All methods may be called concurrently, and none blocks.
package refusal

import (
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Period is the least time between two Events, and two log records, about one Pod.
const Period = 5 * time.Minute

// maxPods bounds the Pods that are remembered.
const maxPods = 10000

// reason is the reason of the Events.
const reason = "Refused"

// Events takes Kubernetes Events; events.EventRecorder has it.
type Events interface {
	Eventf(regarding runtime.Object, related runtime.Object, eventtype, reason, action, note string, args ...any)
}

// Config is what a Recorder needs.
type Config struct {
	Events  Events
	Metrics prometheus.Registerer
	Log     logr.Logger
	Clock   clock.PassiveClock
}

// Recorder records refusals.
type Recorder struct {
	config Config
	counts *prometheus.CounterVec

	mu   sync.Mutex
	last map[string]time.Time // of the last Event, by the uid of the Pod
}

// New returns a recorder that has registered its metric.
func New(cfg Config) (*Recorder, error) {
	r := &Recorder{config: cfg, last: map[string]time.Time{}, counts: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "fastsandbox_refused_total", Help: "What was refused of agents because it was not theirs to say, by kind: report, tombstone, pod."},
		[]string{"kind"})}
	if err := cfg.Metrics.Register(r.counts); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return r, nil
}

// Refused records that n things of a kind were refused of an agent, which its Pod describes.
func (r *Recorder) Refused(agent *agentv1.AgentInfo, kind string, n int) {
	r.counts.WithLabelValues(kind).Add(float64(n))
	if !r.due(agent.GetPodUid()) {
		return
	}
	r.config.Log.Info("refused what an agent may not say", obs.KeyPod, agent.GetNamespace()+"/"+agent.GetPodName(), obs.KeyAgentUID, agent.GetPodUid(),
		obs.KeyKind, kind, obs.KeyCount, n)
	r.config.Events.Eventf(&corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: agent.GetNamespace(), Name: agent.GetPodName(), UID: types.UID(agent.GetPodUid())},
	}, nil, corev1.EventTypeWarning, reason, "Verify", "%s", note(kind, n))
}

func note(kind string, n int) string {
	if kind == KindPod {
		return "the Pod has the labels of an agent and no SandboxPool that exists owns it: it gets no sandboxes"
	}
	return fmt.Sprintf("the agent sent %d (%s) that name another agent, namespace or pool; they are ignored", n, kind)
}

// KindPod is the kind of a Pod that is no agent.
const KindPod = "pod"

// due reports whether an Event about a Pod may be raised now.
func (r *Recorder) due(uid string) bool {
	now := r.config.Clock.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, ok := r.last[uid]; ok && now.Sub(at) < Period {
		return false
	}
	if len(r.last) >= maxPods {
		for other, at := range r.last {
			if now.Sub(at) >= Period {
				delete(r.last, other)
			}
		}
		if len(r.last) >= maxPods {
			return false
		}
	}
	r.last[uid] = now
	return true
}
